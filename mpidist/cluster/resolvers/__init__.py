"""Cluster resolvers: each reads the description of the cluster from one source."""
