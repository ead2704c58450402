"""Pipelines: a stream of items, and the source that reads them."""
