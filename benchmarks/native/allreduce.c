/* What MPI_Allreduce takes without Python: calls of one array, in place or not, in chunks, timed from outside. */
#include <mpi.h>
#include <stddef.h>

/* `communicator` is the address of a handle, as mpi4py._addressof gives it. `chunk` counts elements. Returns MPI's code. */
int all_reduce_floats(const MPI_Comm *communicator, const float *source, float *total, ptrdiff_t count,
                      ptrdiff_t chunk, int calls)
{
    for (int call = 0; call < calls; call++) {
        for (ptrdiff_t begin = 0; begin < count; begin += chunk) {
            int here = (int)(count - begin < chunk ? count - begin : chunk);
            const void *from = source == total ? MPI_IN_PLACE : source + begin;
            int code = MPI_Allreduce(from, total + begin, here, MPI_FLOAT, MPI_SUM, *communicator);
            if (code != MPI_SUCCESS)
                return code;
        }
    }
    return MPI_SUCCESS;
}
