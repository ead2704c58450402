"""Arrays in GPU memory: CUDA, NCCL, staging, and whether MPI takes device pointers."""
