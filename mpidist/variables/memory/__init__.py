"""The memory of variables on a node."""
