"""`mpidist doctor`: what this machine, this job and this cluster lack."""
