"""Pipelines: streams of items joined with the way to read them."""
