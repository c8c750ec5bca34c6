/*
 * The collectives of `symmem bench`, done by MPI: on f32, sums where there is something to combine, between processes of one machine. Places,
 * sizes, warm-up, iterations and statistics are the same, so that the figures can be put side by side: all-reduce and broadcast in place,
 * the others out of place, and a size is that of the larger of the two buffers of a rank.
 *
 * A repetition is a barrier and then n calls back to back; its time per call is that of the slowest rank. The median, least and greatest of
 * the repetitions are printed by rank 0, one line of JSON for each kind and size.
 *
 *     mpi_collectives [kind[,kind...] [repetitions [bytes...]]]
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* As in cmd/symmem/internal/measure. */
enum { bytes_per_repetition = 1 << 28, min_iterations = 4, max_iterations = 50000, vector_floats = 4 };

enum kind { all_reduce, reduce_scatter, all_gather, broadcast, reduce, all_to_all, barrier, kinds };
static const char *const names[kinds] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all", "barrier"};

static int rank, ranks;

static int iterations(long bytes) {
    long n = bytes ? bytes_per_repetition / bytes : max_iterations;
    if (n < min_iterations) n = min_iterations;
    if (n > max_iterations) n = max_iterations;
    return (int)n;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static _Noreturn void fail(const char *what) {
    fprintf(stderr, "mpi_collectives: %s\n", what);
    MPI_Abort(MPI_COMM_WORLD, 1);
    abort();
}

/* A job is one collective with its buffers. Of count elements is what the larger buffer holds, of share each rank's part. */
struct job {
    enum kind kind;
    int count, share;
    float *in, *out; /* the same where it is in place */
};

static void run(const struct job *j) {
    switch (j->kind) {
    case all_reduce: MPI_Allreduce(MPI_IN_PLACE, j->out, j->count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
    case reduce_scatter: MPI_Reduce_scatter_block(j->in, j->out, j->share, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
    case all_gather: MPI_Allgather(j->in, j->share, MPI_FLOAT, j->out, j->share, MPI_FLOAT, MPI_COMM_WORLD); break;
    case broadcast: MPI_Bcast(j->out, j->count, MPI_FLOAT, 0, MPI_COMM_WORLD); break;
    case reduce: MPI_Reduce(j->in, j->out, j->count, MPI_FLOAT, MPI_SUM, 0, MPI_COMM_WORLD); break;
    case all_to_all: MPI_Alltoall(j->in, j->share, MPI_FLOAT, j->out, j->share, MPI_FLOAT, MPI_COMM_WORLD); break;
    case barrier: MPI_Barrier(MPI_COMM_WORLD); break;
    case kinds: break;
    }
}

static double repeat(const struct job *j, int n) {
    MPI_Barrier(MPI_COMM_WORLD);
    double began = MPI_Wtime();
    for (int i = 0; i < n; i++) run(j);
    return (MPI_Wtime() - began) * 1e6 / n;
}

/* What element i of rank r's input is. */
static float value(int r, int i) { return (float)(1 + (i + 3 * r) % 7); }

/* The sum of element i over all ranks. */
static float sum(int i) {
    float s = 0;
    for (int r = 0; r < ranks; r++) s += value(r, i);
    return s;
}

/* Runs once on known values: a wrong result is not measured. Leaves zeros, which can be summed without end. */
static void check(const struct job *j) {
    if (j->kind == barrier) return;
    int ins = j->kind == all_gather ? j->share : j->count, outs = j->kind == reduce_scatter ? j->share : j->count;
    if (j->out != j->in)
        for (int i = 0; i < outs; i++) j->out[i] = -1;
    for (int i = 0; i < ins; i++) j->in[i] = value(rank, i);
    run(j);
    if (j->kind == reduce && rank != 0) outs = 0;
    for (int i = 0; i < outs; i++) {
        float want = 0;
        switch (j->kind) {
        case all_reduce:
        case reduce: want = sum(i); break;
        case reduce_scatter: want = sum(rank * j->share + i); break;
        case all_gather: want = value(i / j->share, i % j->share); break;
        case broadcast: want = value(0, i); break;
        case all_to_all: want = value(i / j->share, rank * j->share + i % j->share); break;
        case barrier:
        case kinds: break;
        }
        if (j->out[i] != want) fail("the result is wrong");
    }
    memset(j->in, 0, (size_t)ins * sizeof(float));
}

static float *buffer(int count) {
    float *data;
    if (posix_memalign((void **)&data, 4096, (size_t)count * sizeof(float) + 4096)) fail("out of memory");
    memset(data, 0, (size_t)count * sizeof(float));
    return data;
}

static void measure(enum kind kind, long bytes, int repetitions) {
    struct job j = {.kind = kind};
    if (kind == all_reduce || kind == broadcast || kind == reduce) { /* which are not shared out */
        j.count = (int)((bytes + 3) / 4);
    } else { /* a share of a vector and more is whole vectors */
        j.share = (int)((bytes + 4L * ranks - 1) / (4L * ranks));
        if (j.share >= vector_floats) j.share = (j.share + vector_floats - 1) / vector_floats * vector_floats;
        j.count = j.share * ranks;
    }
    j.in = j.out = buffer(j.count);
    if (kind != all_reduce && kind != broadcast) j.out = buffer(j.count);
    bytes = 4L * j.count;
    int n = iterations(bytes);
    double *mine = malloc(sizeof(double) * (size_t)repetitions), *slowest = malloc(sizeof(double) * (size_t)repetitions);
    if (!mine || !slowest) fail("out of memory");
    check(&j);
    repeat(&j, n);
    for (int i = 0; i < repetitions; i++) mine[i] = repeat(&j, n);
    MPI_Reduce(mine, slowest, repetitions, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    if (rank == 0) {
        qsort(slowest, (size_t)repetitions, sizeof(double), ascending);
        double median = (slowest[(repetitions - 1) / 2] + slowest[repetitions / 2]) / 2;
        printf("{\"kind\":\"%s\",\"backend\":\"mpi\",\"ranks\":%d,\"bytes\":%ld,\"dtype\":\"f32\",\"op\":\"sum\","
               "\"iterations\":%d,\"repetitions\":%d,\"median_us\":%.6f,\"min_us\":%.6f,\"max_us\":%.6f}\n",
               names[kind], ranks, bytes, n, repetitions, median, slowest[0], slowest[repetitions - 1]);
        fflush(stdout);
    }
    if (j.out != j.in) free(j.out);
    free(j.in);
    free(mine);
    free(slowest);
}

static enum kind parse(const char *name) {
    for (int k = 0; k < kinds; k++)
        if (strcmp(name, names[k]) == 0) return (enum kind)k;
    fail("a kind is all_reduce, reduce_scatter, all_gather, broadcast, reduce, all_to_all or barrier");
}

int main(int argc, char **argv) {
    static const long usual[] = {1L << 10, 64L << 10, 1L << 20, 64L << 20};
    long sizes[64];
    int n = 0, repetitions = argc > 2 ? atoi(argv[2]) : 15;
    char list[256] = "all_reduce";
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (repetitions < 1 || repetitions > 10000) fail("1 to 10000 repetitions are allowed");
    if (argc > 1 && snprintf(list, sizeof(list), "%s", argv[1]) >= (int)sizeof(list)) fail("the list of kinds is too long");
    for (int i = 3; i < argc; i++) {
        char *end;
        if (n == (int)(sizeof(sizes) / sizeof(sizes[0]))) fail("64 sizes at most");
        sizes[n] = strtol(argv[i], &end, 10);
        if (*end || sizes[n] < 4 || sizes[n] > 1L << 32) fail("a size is a number of bytes, 4 to 2^32");
        n++;
    }
    if (n == 0) {
        memcpy(sizes, usual, sizeof(usual));
        n = sizeof(usual) / sizeof(usual[0]);
    }
    for (char *name = strtok(list, ","); name; name = strtok(NULL, ",")) {
        enum kind kind = parse(name);
        if (kind == barrier) {
            measure(kind, 0, repetitions);
            continue;
        }
        for (int i = 0; i < n; i++) measure(kind, sizes[i], repetitions);
    }
    MPI_Finalize();
    return 0;
}
