"""Tests of Keras models over several ranks."""
