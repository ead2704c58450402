"""`mpidist sbatch` writes job scripts for Slurm; `mpidist lint` checks them."""
