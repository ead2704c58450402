"""Construction of variables: initial values and shards."""
