"""Reading: how items become arrays."""
