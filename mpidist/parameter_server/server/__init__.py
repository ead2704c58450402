"""The server: it holds variables, and applies what the coordinator commits."""
