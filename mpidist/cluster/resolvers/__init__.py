"""Resolvers: each describes the cluster from one source."""
