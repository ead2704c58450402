"""Failures: the detection of deadlocks and dead ranks, and the end of a job. Nothing here calls MPI."""
