"""Arithmetic of collectives: cutting, combining and merging arrays. Nothing here communicates."""
