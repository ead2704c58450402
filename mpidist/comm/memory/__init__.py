"""Memory that the ranks of a node share, and memory of one rank that other ranks read."""
