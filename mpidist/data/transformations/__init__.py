"""Transformations of datasets, one module each: the order of the items, and the method of `Dataset`."""
