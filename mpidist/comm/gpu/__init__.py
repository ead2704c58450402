"""Arrays in GPU memory: CUDA, NCCL, staging, and MPI libraries that take device pointers.

It has never run on a GPU: docs/gpus.md says what is proven, and how.
"""
