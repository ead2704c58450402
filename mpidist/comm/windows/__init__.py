"""The ways by which ranks reach each other's memory: one-sided calls of MPI, and sockets."""
