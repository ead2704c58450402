"""Files that a job leaves for `mpidist run`, which has started it: its ranks, its saves, and its end."""
