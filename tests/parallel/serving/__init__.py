"""Tests of parameter servers on several ranks."""
