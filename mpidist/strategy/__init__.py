"""Strategies: the user's one entry to scope, run, reduce, gather and data."""
