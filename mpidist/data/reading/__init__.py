"""Reading: makes arrays from items."""
