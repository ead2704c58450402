"""Tests of models of PyTorch on several ranks."""
