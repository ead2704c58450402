"""Checkpoints: saves the objects of a program to one HDF5 file, and restores them on any number of ranks."""
