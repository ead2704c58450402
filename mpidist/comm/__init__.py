"""Communicators, collectives and node memory: how ranks find each other and move arrays."""
