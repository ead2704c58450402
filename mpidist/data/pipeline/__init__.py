"""Pipelines: a stream of items joined with the source that reads them."""
