"""Slurm: its host lists, job steps, and jobs."""
