"""Preemption: notices that the job is about to end, the last checkpoint, and requeueing."""
