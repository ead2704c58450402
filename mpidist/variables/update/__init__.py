"""The arithmetic of an update: kernels and options. It has no variables, and does not communicate."""
