"""Parameter servers: their protocol, and the coordinator's, the servers' and the workers' part of it."""
