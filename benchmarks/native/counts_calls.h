/* The calls of MPI that have counts: included for those of int, and for those of MPI_Count, whose names end in _c. */
BOTH(NAME(Bcast), NAME(Ibcast), (H at, COUNT count, H type, int root, H comm), (at, count, type, root, comm),
     rank(comm) == root ? bytes(count, type) : 0, rank(comm) == root ? 0 : bytes(count, type))
BOTH(NAME(Allreduce), NAME(Iallreduce), (H from, H to, COUNT count, H type, H op, H comm),
     (from, to, count, type, op, comm),
     bytes(count, type), bytes(count, type))
BOTH(NAME(Scan), NAME(Iscan), (H from, H to, COUNT count, H type, H op, H comm), (from, to, count, type, op, comm),
     bytes(count, type), bytes(count, type))
BOTH(NAME(Exscan), NAME(Iexscan), (H from, H to, COUNT count, H type, H op, H comm),
     (from, to, count, type, op, comm),
     bytes(count, type), bytes(count, type))
BOTH(NAME(Reduce), NAME(Ireduce), (H from, H to, COUNT count, H type, H op, int root, H comm),
     (from, to, count, type, op, root, comm), bytes(count, type), rank(comm) == root ? bytes(count, type) : 0)
BOTH(NAME(Reduce_scatter), NAME(Ireduce_scatter), (H from, H to, const COUNT *all, H type, H op, H comm),
     (from, to, all, type, op, comm), bytes(SUM(all, comm), type), bytes(all[rank(comm)], type))
BOTH(NAME(Reduce_scatter_block), NAME(Ireduce_scatter_block), (H from, H to, COUNT count, H type, H op, H comm),
     (from, to, count, type, op, comm), bytes(count * ranks(comm), type), bytes(count, type))
BOTH(NAME(Allgather), NAME(Iallgather), (H from, COUNT count, H type, H to, COUNT room, H as, H comm),
     (from, count, type, to, room, as, comm), bytes(count, type), bytes(room * ranks(comm), as))
BOTH(NAME(Allgatherv), NAME(Iallgatherv),
     (H from, COUNT count, H type, H to, const COUNT *all, H where, H as, H comm),
     (from, count, type, to, all, where, as, comm), bytes(count, type), bytes(SUM(all, comm), as))
BOTH(NAME(Gather), NAME(Igather), (H from, COUNT count, H type, H to, COUNT room, H as, int root, H comm),
     (from, count, type, to, room, as, root, comm), bytes(count, type),
     rank(comm) == root ? bytes(room * ranks(comm), as) : 0)
BOTH(NAME(Gatherv), NAME(Igatherv),
     (H from, COUNT count, H type, H to, const COUNT *all, H where, H as, int root, H comm),
     (from, count, type, to, all, where, as, root, comm), bytes(count, type),
     rank(comm) == root ? bytes(SUM(all, comm), as) : 0)
BOTH(NAME(Scatter), NAME(Iscatter), (H from, COUNT count, H type, H to, COUNT room, H as, int root, H comm),
     (from, count, type, to, room, as, root, comm), rank(comm) == root ? bytes(count * ranks(comm), type) : 0,
     bytes(room, as))
BOTH(NAME(Scatterv), NAME(Iscatterv),
     (H from, const COUNT *all, H where, H type, H to, COUNT room, H as, int root, H comm),
     (from, all, where, type, to, room, as, root, comm), rank(comm) == root ? bytes(SUM(all, comm), type) : 0,
     bytes(room, as))
BOTH(NAME(Alltoall), NAME(Ialltoall), (H from, COUNT count, H type, H to, COUNT room, H as, H comm),
     (from, count, type, to, room, as, comm), bytes(count * ranks(comm), type), bytes(room * ranks(comm), as))
BOTH(NAME(Alltoallv), NAME(Ialltoallv),
     (H from, const COUNT *all, H where, H type, H to, const COUNT *rooms, H places, H as, H comm),
     (from, all, where, type, to, rooms, places, as, comm), bytes(SUM(all, comm), type), bytes(SUM(rooms, comm), as))

BOTH(NAME(Send), NAME(Isend), (H from, COUNT count, H type, int to, int tag, H comm),
     (from, count, type, to, tag, comm), bytes(count, type), 0)
BOTH(NAME(Ssend), NAME(Issend), (H from, COUNT count, H type, int to, int tag, H comm),
     (from, count, type, to, tag, comm), bytes(count, type), 0)
BOTH(NAME(Rsend), NAME(Irsend), (H from, COUNT count, H type, int to, int tag, H comm),
     (from, count, type, to, tag, comm), bytes(count, type), 0)
BOTH(NAME(Bsend), NAME(Ibsend), (H from, COUNT count, H type, int to, int tag, H comm),
     (from, count, type, to, tag, comm), bytes(count, type), 0)
MPI(NAME(Recv), (H to, COUNT count, H type, int from, int tag, H comm, H status),
     (to, count, type, from, tag, comm, status), 0,
    bytes(count, type))
MPI(NAME(Irecv), (H to, COUNT count, H type, int from, int tag, H comm, H request),
    (to, count, type, from, tag, comm, request), 0, bytes(count, type))
MPI(NAME(Mrecv), (H to, COUNT count, H type, H message, H status),
     (to, count, type, message, status), 0, bytes(count, type))
MPI(NAME(Imrecv), (H to, COUNT count, H type, H message, H request),
     (to, count, type, message, request), 0, bytes(count, type))
MPI(NAME(Sendrecv),
    (H out, COUNT sent, H type, int to, int tag, H in, COUNT room, H as, int from, int its, H comm, H status),
    (out, sent, type, to, tag, in, room, as, from, its, comm, status), bytes(sent, type), bytes(room, as))
MPI(NAME(Put), (H at, COUNT count, H type, int rank, H where, COUNT room, H as, H win),
    (at, count, type, rank, where, room, as, win), bytes(count, type), 0)
MPI(NAME(Get), (H at, COUNT count, H type, int rank, H where, COUNT room, H as, H win),
    (at, count, type, rank, where, room, as, win), 0, bytes(count, type))
