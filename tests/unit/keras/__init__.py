"""Tests of the adapter of Keras without ranks."""
