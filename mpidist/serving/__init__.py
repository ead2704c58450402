"""Serving: what a parameter server or a worker does while it serves, and the messages that it sends and gets."""
