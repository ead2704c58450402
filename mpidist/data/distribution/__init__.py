"""Distribution: each rank's share of a dataset, and its iterator."""
