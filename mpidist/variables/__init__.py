"""Variables: arrays that replicas share, and the memory that holds them."""
