"""Checkpoints: a tree of arrays, agreed on by a group of ranks, in one HDF5 file."""
