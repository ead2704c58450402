"""Parameter servers: the messages, and the parts of the coordinator, the servers and the workers."""
