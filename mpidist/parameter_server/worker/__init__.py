"""The worker: runs closures."""
