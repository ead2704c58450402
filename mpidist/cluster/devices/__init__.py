"""Devices: their names, and the choice of a GPU for each rank."""
