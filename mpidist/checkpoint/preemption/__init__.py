"""A job that is about to end: the notice, the last checkpoint, and the queue."""
