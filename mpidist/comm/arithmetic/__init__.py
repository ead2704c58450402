"""Arithmetic of collectives: how arrays are cut, combined and merged. Nothing here communicates."""
