"""Clusters: the ranks that take part, their tasks and devices, and the resolvers that describe them."""
