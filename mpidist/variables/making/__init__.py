"""The making of variables: their initial values and shards."""
