"""Windows: access to other ranks' memory, by one-sided calls of MPI or by sockets."""
