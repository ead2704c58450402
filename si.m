ok    mpidist            0.1.0, Python 3.11.7, /tmp/ci/mpich/bin/python
ok    launcher           mpirun of MPICH
ok    MPI library        MPICH 5.0.2
ok    survives a death   mpirun -disable-auto-cleanup -genv UCX_TLS '^cma' -launcher fork -hosts 127.0.0.1:1,127.0.0.2:1,127.0.0.3:1,127.0.0.4:1 -n 4 python train.py
ok    cores              2 of 2 may be used, 1 NUMA domain(s); OMP_NUM_THREADS=1
ok    node memory        /dev/shm has 25.3 GB, 22.4 GB free: for the variables of a node's ranks, once
ok    GPUs               none is visible
ok    packages           numpy 2.4.6, mpi4py 4.1.2, h5py 3.16.0, torch 2.13.0+cpu, jax 0.10.2, keras 3.15.1, tensorboardX 2.6.5
ok    HDF5               2.0.0, h5py 3.16.0, serial, with which all ranks write in parallel, too
note  compiled steps     llvmlite is not installed: optimizers make several passes over memory
                         mend: pip install 'mpidist[fast]'
ok    Slurm              this is no job of Slurm's
ok    ranks              2 on 1 node(s) of 2 to 2, 1 host(s)
ok    cores of ranks     node 0: 2 rank(s) on 2 core(s), 2 to 2 each, 2 thread(s)
ok    threads in MPI     THREAD_MULTIPLE, MPICH 5.0.2
ok    death of a rank    ends the job; parameter servers go on if it is started by: mpirun -disable-auto-cleanup -genv UCX_TLS '^cma' -launcher fork -hosts 127.0.0.1:1,127.0.0.2:1 -n 2 python train.py
ok    collective         backend AUTO: NODE, default sizes for two ranks; 2 ranks on 1 nodes
ok    sum of 8 B               4.4 us   0.002 GB/s, MPI alone       2.1 us   0.004 GB/s (median of 25)
ok    sum of 1 KiB             4.9 us   0.208 GB/s, MPI alone       3.5 us   0.295 GB/s (median of 25)
ok    sum of 64 KiB            9.1 us   7.176 GB/s, MPI alone      22.0 us   2.978 GB/s (median of 25)
ok    sum of 1 MiB           152.7 us   6.865 GB/s, MPI alone     157.8 us   6.646 GB/s (median of 25)
ok    sum of 16 MiB         2434.6 us   6.891 GB/s, MPI alone    3122.7 us   5.373 GB/s (median of 25)
ok    sum of 64 MiB         6814.9 us   9.847 GB/s, MPI alone   34406.2 us   1.950 GB/s (median of 25)
