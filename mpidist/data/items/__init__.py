"""The order of examples, as pure arithmetic: nothing is read here."""
