"""The walk over a checkpoint's objects: what it holds of them, and what a file holds for them."""
