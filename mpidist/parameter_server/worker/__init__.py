"""The worker: it runs closures."""
