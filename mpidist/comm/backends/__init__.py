"""Backends: each of them moves and combines flat arrays in its own way."""
