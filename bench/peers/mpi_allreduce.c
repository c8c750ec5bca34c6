/*
 * The all-reduce of `symmem bench`, done by MPI: sums of f32, in place, between processes of one machine. Sizes, warm-up,
 * iterations and statistics are the same, so that the figures can be put side by side.
 *
 * A repetition is a barrier and then n calls of MPI_Allreduce back to back; its time per call is that of the slowest rank. The
 * median, least and greatest of the repetitions are printed by rank 0, one line of JSON for each size.
 *
 *     mpi_allreduce [repetitions [bytes...]]
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* As in cmd/symmem/bench_rank.go. */
enum { bytes_per_repetition = 1 << 28, min_iterations = 4, max_iterations = 50000 };

static int iterations(long bytes) {
    long n = bytes_per_repetition / bytes;
    if (n < min_iterations) n = min_iterations;
    if (n > max_iterations) n = max_iterations;
    return (int)n;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static _Noreturn void fail(const char *what) {
    fprintf(stderr, "mpi_allreduce: %s\n", what);
    MPI_Abort(MPI_COMM_WORLD, 1);
    abort();
}

static double repeat(float *data, int count, int n) {
    MPI_Barrier(MPI_COMM_WORLD);
    double began = MPI_Wtime();
    for (int i = 0; i < n; i++)
        MPI_Allreduce(MPI_IN_PLACE, data, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    return (MPI_Wtime() - began) * 1e6 / n;
}

/* Runs once on known values: a wrong result is not measured. Leaves zeros, which can be summed without end. */
static void check(float *data, int count, int rank, int ranks) {
    for (int i = 0; i < count; i++) data[i] = (float)(1 + (i + rank) % 2);
    MPI_Allreduce(MPI_IN_PLACE, data, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    for (int i = 0; i < count; i++) {
        float want = 0;
        for (int r = 0; r < ranks; r++) want += (float)(1 + (i + r) % 2);
        if (data[i] != want) fail("the result is wrong");
    }
    memset(data, 0, (size_t)count * sizeof(float));
}

static void measure(long bytes, int repetitions, int rank, int ranks) {
    int count = (int)((bytes + 3) / 4), n = iterations(bytes);
    float *data;
    double *mine = malloc(sizeof(double) * (size_t)repetitions), *slowest = malloc(sizeof(double) * (size_t)repetitions);
    if (posix_memalign((void **)&data, 4096, (size_t)count * sizeof(float) + 4096) || !mine || !slowest) fail("out of memory");
    check(data, count, rank, ranks);
    repeat(data, count, n);
    for (int i = 0; i < repetitions; i++) mine[i] = repeat(data, count, n);
    MPI_Reduce(mine, slowest, repetitions, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    if (rank == 0) {
        qsort(slowest, (size_t)repetitions, sizeof(double), ascending);
        double median = (slowest[(repetitions - 1) / 2] + slowest[repetitions / 2]) / 2;
        printf("{\"kind\":\"all_reduce\",\"backend\":\"mpi\",\"ranks\":%d,\"bytes\":%ld,\"dtype\":\"f32\",\"op\":\"sum\","
               "\"iterations\":%d,\"repetitions\":%d,\"median_us\":%.6f,\"min_us\":%.6f,\"max_us\":%.6f}\n",
               ranks, bytes, n, repetitions, median, slowest[0], slowest[repetitions - 1]);
        fflush(stdout);
    }
    free(data);
    free(mine);
    free(slowest);
}

int main(int argc, char **argv) {
    static const long usual[] = {1L << 10, 64L << 10, 1L << 20, 64L << 20};
    int rank, ranks, repetitions = argc > 1 ? atoi(argv[1]) : 15;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (repetitions < 1 || repetitions > 10000) fail("1 to 10000 repetitions are allowed");
    if (argc > 2) {
        for (int i = 2; i < argc; i++) {
            char *end;
            long bytes = strtol(argv[i], &end, 10);
            if (*end || bytes < 4 || bytes > 1L << 32) fail("a size is a number of bytes, 4 to 2^32");
            measure(bytes, repetitions, rank, ranks);
        }
    } else {
        for (size_t i = 0; i < sizeof(usual) / sizeof(usual[0]); i++) measure(usual[i], repetitions, rank, ranks);
    }
    MPI_Finalize();
    return 0;
}
