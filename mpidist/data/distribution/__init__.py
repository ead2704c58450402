"""Distribution of datasets: each rank's share, and the iterator that keeps the ranks in step."""
