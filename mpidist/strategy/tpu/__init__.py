"""`TPUStrategy`: a replica is a group of ranks, its logical devices."""
