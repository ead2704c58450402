"""Arrays in GPU memory: CUDA, NCCL, staging, and MPI libraries that take device pointers.

This package is untested on a GPU (simulated CuPy only).
"""
