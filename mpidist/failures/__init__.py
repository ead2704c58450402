"""Failures: who waits for whom, who has died, and how a job ends. Nothing here calls MPI."""
