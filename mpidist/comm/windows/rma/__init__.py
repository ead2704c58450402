"""Windows by MPI's one-sided calls."""
