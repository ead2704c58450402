"""Callbacks of a training, one a module."""
