"""Gradients with the same bits on any number of ranks, by logical replicas."""
