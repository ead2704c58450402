"""Programs with Keras models."""
