"""The directory of checkpoints: file names, the lock, the state file, and the deletion of old files."""
