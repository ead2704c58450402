/* Counts what a process does: communicating calls of MPI with their bytes, and calls of libc on files.

   Loaded before all other libraries (LD_PRELOAD), it stands before MPI_... and open, and calls PMPI_... and the next
   open. Handles of MPI are integers or pointers, which registers hold alike: so it needs no header of any MPI.

   Not counted: calls that ask and do not communicate (Test, Wait, Iprobe), since a slow machine makes more of them, and
   what MPI and libc do inside. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

/* Their order is that of KINDS in scale_counts_rank.py. */
enum { MPI_CALLS, SENT, RECEIVED, OPENED, PROC, PATHS, MAPPED, KINDS };

/* Those of the thread that runs the program, then those of all others. */
static long counts[2][KINDS];
static char end_path[4096];

/* 0 for the thread that runs the program. */
static int thread(void)
{
    static __thread int known;
    if (!known)
        known = gettid() == getpid() ? 1 : 2;
    return known - 1;
}

static void note(int kind, long amount)
{
    __atomic_fetch_add(&counts[thread()][kind], amount, __ATOMIC_RELAXED);
}

long *scale_counts(void)
{
    return counts[0];
}

/* Where the counts are written when the process ends. */
void scale_counts_end(const char *path)
{
    snprintf(end_path, sizeof end_path, "%s", path);
}

static void write_end(void)
{
    static int written;
    if (!end_path[0] || __atomic_exchange_n(&written, 1, __ATOMIC_RELAXED))
        return;
    long copy[2 * KINDS];
    memcpy(copy, counts, sizeof copy);
    FILE *file = fopen(end_path, "w");
    if (!file)
        return;
    for (int place = 0; place < 2 * KINDS; place++)
        fprintf(file, "%ld ", copy[place]);
    fclose(file);
}

__attribute__((destructor)) static void at_end(void)
{
    write_end();
}

void _exit(int code)
{
    static void (*next)(int) __attribute__((noreturn));
    write_end();
    next = dlsym(RTLD_NEXT, "_exit");
    next(code);
}

/* ---- MPI ---- */

static int see(struct dl_phdr_info *info, size_t size, void *found)
{
    (void)size;
    if (!strstr(info->dlpi_name, "/libmpi.so"))
        return 0;
    *(const char **)found = info->dlpi_name;
    return 1;
}

/* Python loads libmpi for mpi4py alone, where RTLD_NEXT does not look. */
static void *find(const char *name)
{
    static void *library;
    if (!library) {
        const char *path = NULL;
        dl_iterate_phdr(see, &path);
        library = path ? dlopen(path, RTLD_NOLOAD | RTLD_LAZY) : NULL;
    }
    void *function = library ? dlsym(library, name) : NULL;
    if (!function) {
        fprintf(stderr, "counts.c: no %s in the MPI library of this process\n", name);
        abort();
    }
    return function;
}

typedef intptr_t H; /* a handle, a pointer to what is not read here, or an integer that is passed on */

static long bytes(long count, H type)
{
    static int (*size_of)(H, int *);
    int size = 0;
    if (!size_of)
        size_of = find("PMPI_Type_size");
    size_of(type, &size);
    return count * size;
}

static long ranks(H comm)
{
    static int (*size_of)(H, int *);
    int size = 0;
    if (!size_of)
        size_of = find("PMPI_Comm_size");
    size_of(comm, &size);
    return size;
}

static int rank(H comm)
{
    static int (*rank_of)(H, int *);
    int found = 0;
    if (!rank_of)
        rank_of = find("PMPI_Comm_rank");
    rank_of(comm, &found);
    return found;
}

static long sum(const int *all, H comm)
{
    long total = 0;
    for (long other = ranks(comm); all && other-- > 0;)
        total += all[other];
    return total;
}

__attribute__((unused)) static long sum_c(const int64_t *all, H comm)
{
    long total = 0;
    for (long other = ranks(comm); all && other-- > 0;)
        total += all[other];
    return total;
}

#define MPI_CALL(name, symbol, parameters, arguments, sent, received) \
    int name parameters                                                \
    {                                                                  \
        static int(*next) parameters;                                  \
        if (!next)                                                     \
            next = find(symbol);                                       \
        note(MPI_CALLS, 1);                                            \
        note(SENT, sent);                                              \
        note(RECEIVED, received);                                      \
        return next arguments;                                         \
    }
#define PASTE(name) MPI_##name
#define TEXT(name) "PMPI_" #name
#define MPI(name, parameters, arguments, sent, received) \
    MPI_CALL(PASTE(name), TEXT(name), parameters, arguments, sent, received)
#define OPEN(...) __VA_ARGS__
/* The same with and without a request. */
#define BOTH(name, i_name, parameters, arguments, sent, received)  \
    MPI(name, (OPEN parameters), (OPEN arguments), sent, received) \
    MPI(i_name, (OPEN parameters, H request), (OPEN arguments, request), sent, received)

BOTH(Barrier, Ibarrier, (H comm), (comm), 0, 0)
/* Of plain counts, and of large ones. */
#define COUNT int
#define NAME(name) name
#define SUM sum
#include "counts_calls.h"
#undef COUNT
#undef NAME
#undef SUM
#ifdef LARGE_COUNTS /* mpi4py takes these where they are there, also if they are here and not in MPI */
#define COUNT int64_t
#define NAME(name) name##_c
#define SUM sum_c
#include "counts_calls.h"
#endif

#define MAKES(name, parameters, arguments) MPI(name, parameters, arguments, 0, 0)
MAKES(Comm_dup, (H comm, H made), (comm, made))
MAKES(Comm_dup_with_info, (H comm, H info, H made), (comm, info, made))
MAKES(Comm_idup, (H comm, H made, H request), (comm, made, request))
MAKES(Comm_split, (H comm, int color, int key, H made), (comm, color, key, made))
MAKES(Comm_split_type, (H comm, int type, int key, H info, H made), (comm, type, key, info, made))
MAKES(Comm_create, (H comm, H group, H made), (comm, group, made))
MAKES(Comm_create_group, (H comm, H group, int tag, H made), (comm, group, tag, made))
MAKES(Comm_free, (H comm), (comm))
MAKES(Win_create, (H base, H size, int unit, H info, H comm, H win), (base, size, unit, info, comm, win))
MAKES(Win_allocate, (H size, int unit, H info, H comm, H base, H win), (size, unit, info, comm, base, win))
MAKES(Win_allocate_shared, (H size, int unit, H info, H comm, H base, H win), (size, unit, info, comm, base, win))
MAKES(Win_free, (H win), (win))

/* ---- files ---- */

static void note_path(int kind, const char *path)
{
    note(kind, 1);
    if (path && !strncmp(path, "/proc/", 6))
        note(PROC, 1);
}

#define NEXT(name) __extension__({ static __typeof__(&name) next; if (!next) next = dlsym(RTLD_NEXT, #name); next; })
#define MODE(last)                                                         \
    mode_t mode = 0;                                                       \
    if (flags & (O_CREAT | __O_TMPFILE)) {                                 \
        va_list more;                                                      \
        va_start(more, last);                                              \
        mode = va_arg(more, mode_t);                                       \
        va_end(more);                                                      \
    }
#define OPENS(name)                              \
    int name(const char *path, int flags, ...)   \
    {                                            \
        MODE(flags)                              \
        note_path(OPENED, path);                 \
        return NEXT(name)(path, flags, mode);    \
    }
#define OPENS_AT(name)                                    \
    int name(int folder, const char *path, int flags, ...) \
    {                                                     \
        MODE(flags)                                       \
        note_path(OPENED, path);                          \
        return NEXT(name)(folder, path, flags, mode);     \
    }
#define ON_PATH(kind, type, name, parameters, arguments) \
    type name parameters                                 \
    {                                                    \
        note_path(kind, path);                           \
        return NEXT(name) arguments;                     \
    }

OPENS(open)
OPENS(open64)
OPENS_AT(openat)
OPENS_AT(openat64)
/* What FORTIFY makes of open without a mode. */
int __open_2(const char *path, int flags);
int __open64_2(const char *path, int flags);
int __openat_2(int folder, const char *path, int flags);
int __openat64_2(int folder, const char *path, int flags);
ON_PATH(OPENED, int, __open_2, (const char *path, int flags), (path, flags))
ON_PATH(OPENED, int, __open64_2, (const char *path, int flags), (path, flags))
ON_PATH(OPENED, int, __openat_2, (int folder, const char *path, int flags), (folder, path, flags))
ON_PATH(OPENED, int, __openat64_2, (int folder, const char *path, int flags), (folder, path, flags))
ON_PATH(OPENED, FILE *, fopen, (const char *path, const char *mode), (path, mode))
ON_PATH(OPENED, FILE *, fopen64, (const char *path, const char *mode), (path, mode))
ON_PATH(OPENED, DIR *, opendir, (const char *path), (path))
ON_PATH(OPENED, int, shm_open, (const char *path, int flags, mode_t mode), (path, flags, mode))
ON_PATH(PATHS, ssize_t, readlink, (const char *path, char *text, size_t room), (path, text, room))
ON_PATH(PATHS, int, access, (const char *path, int mode), (path, mode))
ON_PATH(PATHS, int, faccessat, (int folder, const char *path, int mode, int flags), (folder, path, mode, flags))
ON_PATH(PATHS, int, stat, (const char *path, struct stat *found), (path, found))
ON_PATH(PATHS, int, lstat, (const char *path, struct stat *found), (path, found))
ON_PATH(PATHS, int, fstatat, (int folder, const char *path, struct stat *found, int flags), (folder, path, found, flags))
ON_PATH(PATHS, int, stat64, (const char *path, struct stat64 *found), (path, found))
ON_PATH(PATHS, int, lstat64, (const char *path, struct stat64 *found), (path, found))
ON_PATH(PATHS, int, fstatat64, (int folder, const char *path, struct stat64 *found, int flags),
        (folder, path, found, flags))
ON_PATH(PATHS, int, unlink, (const char *path), (path))
ON_PATH(PATHS, int, unlinkat, (int folder, const char *path, int flags), (folder, path, flags))
ON_PATH(PATHS, int, rename, (const char *path, const char *to), (path, to))
ON_PATH(PATHS, int, mkdir, (const char *path, mode_t mode), (path, mode))
ON_PATH(PATHS, int, rmdir, (const char *path), (path))
ON_PATH(PATHS, char *, realpath, (const char *path, char *found), (path, found))

void *mmap(void *at, size_t size, int access, int flags, int file, off_t from)
{
    /* Maps of files: memory alone is the allocator's. */
    if (file >= 0)
        note(MAPPED, 1);
    return NEXT(mmap)(at, size, access, flags, file, from);
}

void *mmap64(void *at, size_t size, int access, int flags, int file, off64_t from)
{
    if (file >= 0)
        note(MAPPED, 1);
    return NEXT(mmap64)(at, size, access, flags, file, from);
}
