"""The HDF5 file of a checkpoint: its layout, and the bytes that each rank reads and writes."""
