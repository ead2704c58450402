"""The coordinator's queue of closures. It has no input and output, and no threads."""
