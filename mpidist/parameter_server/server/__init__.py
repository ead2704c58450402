"""The server: holds variables, and applies the updates that the coordinator commits."""
