"""Backends of the collectives: each is one algorithm that moves and combines flat arrays."""
