"""The directory of checkpoints: the names in it, its lock, the state file, and what may be deleted."""
