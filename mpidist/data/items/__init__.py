"""Items: which examples, in which order. Pure; nothing is read here."""
