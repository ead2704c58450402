"""Keras's backends torch and jax: how gradients go from their tensors into a collective and back."""
