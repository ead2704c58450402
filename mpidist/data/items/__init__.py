"""Order of examples: which ones come, and when. Pure arithmetic; nothing is read here."""
