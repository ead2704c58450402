"""Reading: the ways from an item to its arrays."""
