"""Transformations of datasets, a module each: the order of the items, and the function that `Dataset` names."""
