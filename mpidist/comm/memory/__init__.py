"""Memory that the ranks of a node share, or reach in one another."""
