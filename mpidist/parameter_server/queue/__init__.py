"""The coordinator's queue of closures; pure."""
