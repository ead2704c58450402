"""The arithmetic of an update: kernels, and the work around them. It knows no variables and does not communicate."""
