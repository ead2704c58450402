"""Distribution: each rank's share of a dataset, and the iterator that keeps the ranks in step."""
