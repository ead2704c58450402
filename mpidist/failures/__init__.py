"""Failures: which rank waits for which, who has died, and how a job ends. Nothing here calls MPI."""
