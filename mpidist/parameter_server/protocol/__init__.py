"""Messages between coordinator, servers and workers, and their transport."""
