"""The distributed model, its callbacks, its results and its files."""
