"""Tests of `TPUStrategy`: replicas of several ranks."""
