"""Communication: communicators, collective operations, and memory that ranks share."""
