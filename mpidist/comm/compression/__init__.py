"""Compressed gradients, with error feedback."""
