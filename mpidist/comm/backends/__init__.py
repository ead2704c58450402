"""Backends: each moves and combines flat arrays in its own way."""
