"""Messages between coordinator, servers and workers, and how they are sent."""
