"""Arrays in GPU memory: CUDA, NCCL, staging, and MPI libraries that take device pointers.

docs/gpus.md says which parts were tested on GPUs, and how.
"""
