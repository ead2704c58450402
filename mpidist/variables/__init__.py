"""Variables: arrays that span ranks, and where they live."""
