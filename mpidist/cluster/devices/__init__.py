"""Devices of ranks: their names, and the GPU of each rank."""
