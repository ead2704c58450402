"""Windows by one-sided calls of MPI (remote memory access)."""
