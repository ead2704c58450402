"""The HDF5 file of a checkpoint: its layout, and the parts that each rank reads and writes."""
