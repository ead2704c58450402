"""`mpidist checkpoint`: looks at checkpoints, compares, verifies and converts them, without the program."""
