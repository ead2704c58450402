"""Communicators, collectives and node memory: ranks find each other here and exchange arrays."""
