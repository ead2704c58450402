"""Slurm: its host lists, steps and jobs."""
