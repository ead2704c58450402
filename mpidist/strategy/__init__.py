"""Strategies: the user's interface to scopes, replicas, reductions and distributed datasets."""
