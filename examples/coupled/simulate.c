/* A simulation that sends what it computes to a program that learns from it; see learn.py.

       mpicc simulate.c -o simulate -lm
       mpirun -n 4 ./simulate 200 : -n 2 python learn.py

   The argument is the number of samples of each rank. */
#include <math.h>
#include <mpi.h>
#include <stdlib.h>
#include <string.h>

#define POINTS 32

int main(int argc, char **argv) {
    int rank, size, sims, samples = argc > 1 ? atoi(argv[1]) : 200;
    const char *header = "float64 32; float64";
    double sample[POINTS + 1];
    MPI_Comm mine;

    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    /* All programs of the job call this once, each with a color of its own. */
    MPI_Comm_split(MPI_COMM_WORLD, 0, rank, &mine);
    MPI_Comm_size(mine, &sims);

    /* The ranks that learn come behind ours, and get samples from as many of us each as possible. */
    int reader = sims + rank % (size - sims);
    MPI_Send(header, strlen(header), MPI_BYTE, reader, 0, MPI_COMM_WORLD);
    for (int number = 0; number < samples; ++number) {
        int seed = number * sims + rank;
        double phase = 6.28 * fmod(0.618034 * seed, 1.0);
        /* A wave at some points, and behind them its frequency. */
        sample[POINTS] = 2.0 * fmod(0.754878 * seed, 1.0);
        for (int point = 0; point < POINTS; ++point)
            sample[point] = sin(0.2 * sample[POINTS] * point + phase);
        /* It waits here for a reader that is slower. */
        MPI_Ssend(sample, sizeof sample, MPI_BYTE, reader, 0, MPI_COMM_WORLD);
    }
    MPI_Send(NULL, 0, MPI_BYTE, reader, 0, MPI_COMM_WORLD);

    MPI_Comm_free(&mine);
    MPI_Finalize();
    return 0;
}
