"""The walk over a checkpoint's objects, and the matching of their paths with those in a file."""
