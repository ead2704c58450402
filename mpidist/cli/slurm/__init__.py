"""`mpidist sbatch` and `mpidist lint`: job scripts, written and read."""
