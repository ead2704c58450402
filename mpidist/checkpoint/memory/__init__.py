"""Copies of a checkpoint's objects in the memory of the nodes, for jobs that `mpidist run` starts again."""
