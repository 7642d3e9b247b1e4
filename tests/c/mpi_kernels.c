/* Three kernels over MPI, as small relatives of the NAS parallel benchmarks, each of which checks
 * its result in every iteration:
 *
 *   mpicc -O2 -o mpi_kernels mpi_kernels.c -lm
 *   mpirun -np 8 mpi_kernels is|ft|lu S|W|A|B ITERATIONS [FILE]
 *
 *   is  keys are sorted by buckets (MPI_Allreduce, MPI_Alltoall, MPI_Alltoallv): in order within
 *       and between processes, none lost or changed
 *   ft  a transform in three dimensions, slab by slab (MPI_Alltoall), and back: the input again,
 *       and one coefficient as its definition gives it
 *   lu  a matrix is factorised by panels that go around a ring (MPI_Send, MPI_Recv): L(Ux) is Ax
 *
 * Process 0 prints lines of JSON: when all are connected to each other (with FILE, they wait
 * until there is one of that name), when iterations begin (CLOCK_MONOTONIC), and what these
 * took. The exit status is 1 where a check failed. */
#include <complex.h>
#include <math.h>
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static int rank, processes;

struct size {
    char name;
    /* of is: all keys; of ft: points in each dimension; of lu: rows. */
    int keys, points, rows;
};

static const struct size SIZES[] = {
    {'S', 1 << 16, 32, 256},
    {'W', 1 << 19, 64, 512},
    {'A', 1 << 21, 64, 1024},
    {'B', 1 << 23, 128, 2048},
};

static void fail(const char *what) {
    if (rank == 0) fprintf(stderr, "mpi_kernels: %s\n", what);
    MPI_Finalize();
    exit(2);
}

static void *need(size_t bytes) {
    void *memory = malloc(bytes ? bytes : 1);
    if (!memory) {
        fprintf(stderr, "mpi_kernels: no memory for %zu bytes\n", bytes);
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    return memory;
}

/* Any number of another, the same everywhere (SplitMix64). */
static uint64_t mixed(uint64_t x) {
    x += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
}

/* From -1 to 1. */
static double number(uint64_t of) {
    return (double)(mixed(of) >> 11) / (1ull << 52) - 1;
}

static int everywhere(int right) {
    int all;
    MPI_Allreduce(&right, &all, 1, MPI_INT, MPI_LAND, MPI_COMM_WORLD);
    return all;
}

/* Integer sort. */

enum { BUCKETS = 1024, KEY_BITS = 19, BUCKET_BITS = 10 };

/* What sorting must not change. */
struct tally {
    uint64_t count, sum, squares;
};

static struct tally tally_of(const uint32_t *keys, int count) {
    struct tally tally = {count, 0, 0}, all;
    for (int i = 0; i < count; i++) {
        tally.sum += keys[i];
        tally.squares += mixed(keys[i]);
    }
    MPI_Allreduce(&tally, &all, 3, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
    return all;
}

/* The process of each bucket, so that all have about the same number of keys. */
static void divide(const int *in_bucket, uint64_t keys, int *owner) {
    int all[BUCKETS];
    MPI_Allreduce(in_bucket, all, BUCKETS, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    uint64_t before = 0;
    for (int b = 0; b < BUCKETS; b++) {
        owner[b] = (int)(before * processes / keys);
        before += all[b];
    }
}

static uint32_t *exchanged(const uint32_t *keys, int count, uint64_t all_keys, int *received) {
    int in_bucket[BUCKETS] = {0}, owner[BUCKETS], next[BUCKETS];
    int *out = need(4 * processes * sizeof(int)), *out_at = out + processes,
        *in = out_at + processes, *in_at = in + processes;
    for (int i = 0; i < count; i++) in_bucket[keys[i] >> (KEY_BITS - BUCKET_BITS)]++;
    divide(in_bucket, all_keys, owner);
    memset(out, 0, processes * sizeof(int));
    for (int b = 0, at = 0; b < BUCKETS; b++) {
        next[b] = at;
        at += in_bucket[b];
        out[owner[b]] += in_bucket[b];
    }
    MPI_Alltoall(out, 1, MPI_INT, in, 1, MPI_INT, MPI_COMM_WORLD);
    int total = 0;
    for (int p = 0, at = 0; p < processes; p++) {
        out_at[p] = at, in_at[p] = total;
        at += out[p], total += in[p];
    }
    uint32_t *outgoing = need(count * sizeof *outgoing), *incoming = need(total * sizeof *incoming);
    for (int i = 0; i < count; i++) outgoing[next[keys[i] >> (KEY_BITS - BUCKET_BITS)]++] = keys[i];
    MPI_Alltoallv(outgoing, out, out_at, MPI_UINT32_T, incoming, in, in_at, MPI_UINT32_T,
                  MPI_COMM_WORLD);
    free(outgoing);
    free(out);
    *received = total;
    return incoming;
}

static void count_sort(uint32_t *keys, int count) {
    uint32_t low = 0, high = 0;
    for (int i = 0; i < count; i++) {
        if (i == 0 || keys[i] < low) low = keys[i];
        if (keys[i] > high) high = keys[i];
    }
    size_t bytes = (high - low + 1) * sizeof(int);
    int *counts = memset(need(bytes), 0, bytes);
    for (int i = 0; i < count; i++) counts[keys[i] - low]++;
    for (uint32_t key = low, at = 0; key <= high; key++)
        while (counts[key - low]-- > 0) keys[at++] = key;
    free(counts);
}

/* Each process's largest key is no larger than the smallest of any behind it; one without keys
 * passes on what it hears. */
static int in_order(const uint32_t *keys, int count) {
    int right = 1;
    for (int i = 1; i < count; i++) right &= keys[i - 1] <= keys[i];
    uint32_t before = 0, last;
    if (rank > 0)
        MPI_Recv(&before, 1, MPI_UINT32_T, rank - 1, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    last = count ? keys[count - 1] : before;
    if (rank + 1 < processes) MPI_Send(&last, 1, MPI_UINT32_T, rank + 1, 1, MPI_COMM_WORLD);
    return right && (!count || before <= keys[0]);
}

static int is(const struct size *size, int iteration) {
    int count = size->keys / processes, received;
    uint32_t *keys = need(count * sizeof *keys);
    uint64_t seed = mixed((uint64_t)iteration << 32 | rank);
    for (int i = 0; i < count; i++) {
        /* The mean of four, as in NAS: the middle buckets are full. */
        uint64_t x = mixed(seed + i), mask = (1 << KEY_BITS) - 1;
        uint64_t y = mixed(x);
        keys[i] = ((x & mask) + (x >> 40 & mask) + (y & mask) + (y >> 40 & mask)) / 4;
    }
    struct tally before = tally_of(keys, count);
    uint32_t *sorted = exchanged(keys, count, before.count, &received);
    count_sort(sorted, received);
    struct tally after = tally_of(sorted, received);
    int right = in_order(sorted, received) && memcmp(&before, &after, sizeof before) == 0;
    free(keys);
    free(sorted);
    return everywhere(right);
}

/* Fourier transform. */

typedef double complex point;

/* In place, `stride` apart; n is a power of two. Both ways unscaled. */
static void transform(point *x, int n, int stride, const point *roots, point *line) {
    for (int i = 0, j = 0; i < n; i++) {
        line[j] = x[(size_t)i * stride];
        int bit = n >> 1;
        for (; j & bit; bit >>= 1) j ^= bit;
        j |= bit;
    }
    for (int half = 1; half < n; half *= 2)
        for (int at = 0; at < n; at += 2 * half)
            for (int k = 0; k < half; k++) {
                point even = line[at + k], odd = line[at + k + half] * roots[k * (n / 2 / half)];
                line[at + k] = even + odd;
                line[at + k + half] = even - odd;
            }
    for (int i = 0; i < n; i++) x[(size_t)i * stride] = line[i];
}

/* From slabs of the first index to slabs of the second, or back: what is local of [a][b][c],
 * `own` of a, becomes [b][a][c], `own` of b. */
static void transpose(point *x, point *space, int n, int own) {
    size_t block = (size_t)own * own * n;
    for (int p = 0; p < processes; p++)
        for (int a = 0; a < own; a++)
            for (int b = 0; b < own; b++)
                memcpy(space + p * block + ((size_t)b * own + a) * n,
                       x + ((size_t)a * n + p * own + b) * n, n * sizeof *x);
    MPI_Alltoall(space, 2 * block, MPI_DOUBLE, x, 2 * block, MPI_DOUBLE, MPI_COMM_WORLD);
    for (int p = 0; p < processes; p++)
        for (int b = 0; b < own; b++)
            memcpy(space + ((size_t)b * n + p * own) * n, x + p * block + (size_t)b * own * n,
                   (size_t)own * n * sizeof *x);
    memcpy(x, space, (size_t)own * n * n * sizeof *x);
}

static void all_lines(point *x, int slabs, int n, int middle, const point *roots, point *line) {
    for (int a = 0; a < slabs; a++)
        for (int i = 0; i < n; i++)
            transform(x + (size_t)a * n * n + (middle ? i : i * n), n, middle ? n : 1, roots, line);
}

/* One coefficient, as its definition has it. */
static point coefficient(const point *x, int n, int own, const int at[3], const point *roots) {
    point mine = 0, all;
    for (int a = 0; a < own; a++)
        for (int b = 0; b < n; b++)
            for (int c = 0; c < n; c++) {
                int turn = ((rank * own + a) * at[0] + b * at[1] + c * at[2]) % n;
                mine += x[((size_t)a * n + b) * n + c] *
                        (turn < n / 2 ? roots[turn] : -roots[turn - n / 2]);
            }
    MPI_Allreduce(&mine, &all, 2, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    return all;
}

static int ft(const struct size *size, int iteration) {
    int n = size->points, own = n / processes;
    size_t local = (size_t)own * n * n;
    point *x = need(local * sizeof *x), *space = need(local * sizeof *x),
          *line = need(2 * n * sizeof *x), *roots = line + n, *back = roots + n / 2;
    uint64_t seed = mixed((uint64_t)iteration << 32 | rank);
    for (int k = 0; k < n / 2; k++) {
        roots[k] = cexp(-2 * M_PI * I * k / n);
        back[k] = conj(roots[k]);
    }
    for (size_t i = 0; i < local; i++) x[i] = number(seed + 2 * i) + I * number(seed + 2 * i + 1);
    int at[3];
    for (int i = 0; i < 3; i++) at[i] = mixed(iteration * 3 + i) % n;
    point expected = coefficient(x, n, own, at, roots);
    all_lines(x, own, n, 0, roots, line);
    all_lines(x, own, n, 1, roots, line);
    transpose(x, space, n, own);
    all_lines(x, own, n, 1, roots, line);
    double tolerance = 1e-12 * n * n * n;
    int right = at[1] / own != rank ||
                cabs(x[((size_t)(at[1] % own) * n + at[0]) * n + at[2]] - expected) < tolerance;
    all_lines(x, own, n, 1, back, line);
    transpose(x, space, n, own);
    all_lines(x, own, n, 1, back, line);
    all_lines(x, own, n, 0, back, line);
    for (size_t i = 0; i < local; i++)
        right &= cabs(x[i] / ((double)n * n * n) -
                      (number(seed + 2 * i) + I * number(seed + 2 * i + 1))) < 1e-12;
    free(x);
    free(space);
    free(line);
    return everywhere(right);
}

/* LU factorisation. */

enum { PANEL = 32 };

/* Its diagonal outweighs the rest of each row, so that no pivots are needed. */
static double entry(int iteration, int n, int row, int column) {
    return number(((uint64_t)iteration * n + row) * n + column) + (row == column ? n : 0);
}

/* Columns of one panel, each of n rows: L below the diagonal, U above. */
static void factorise(double *panel, int n, int first) {
    for (int k = 0; k < PANEL; k++) {
        double *column = panel + (size_t)k * n;
        for (int row = first + k + 1; row < n; row++) column[row] /= column[first + k];
        for (int j = k + 1; j < PANEL; j++) {
            double *other = panel + (size_t)j * n, by = other[first + k];
            for (int row = first + k + 1; row < n; row++) other[row] -= column[row] * by;
        }
    }
}

static void update(double *column, const double *panel, int n, int first) {
    for (int k = 0; k < PANEL; k++) {
        const double *of = panel + (size_t)k * n, by = column[first + k];
        for (int row = first + k + 1; row < n; row++) column[row] -= of[row] * by;
    }
}

/* The panel goes from its owner around the ring. */
static void pass_on(double *panel, int count, int owner) {
    int next = (rank + 1) % processes, previous = (rank + processes - 1) % processes;
    if (rank != owner)
        MPI_Recv(panel, count, MPI_DOUBLE, previous, 2, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    if (next != owner) MPI_Send(panel, count, MPI_DOUBLE, next, 2, MPI_COMM_WORLD);
}

/* Which column of the matrix is this one of ours: panels take turns. */
static int column_of(int own) {
    return (own / PANEL * processes + rank) * PANEL + own % PANEL;
}

/* What L(Ux) and Ax differ by, at the most; x are numbers. */
static double residual(const double *lu, int n, int own, int iteration) {
    double *parts = need(2 * n * sizeof *parts), *ax = parts, *ux = parts + n,
           *sums = need(3 * n * sizeof *sums), *lux = sums + 2 * n, most = 0;
    memset(parts, 0, 2 * n * sizeof *parts);
    for (int j = 0; j < own; j++) {
        int column = column_of(j);
        double x = number(~(uint64_t)column);
        for (int row = 0; row < n; row++) ax[row] += entry(iteration, n, row, column) * x;
        for (int row = 0; row <= column; row++) ux[row] += lu[(size_t)j * n + row] * x;
    }
    MPI_Allreduce(parts, sums, 2 * n, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    memset(parts, 0, n * sizeof *parts);
    for (int j = 0; j < own; j++) {
        int column = column_of(j);
        parts[column] += sums[n + column];
        for (int row = column + 1; row < n; row++)
            parts[row] += lu[(size_t)j * n + row] * sums[n + column];
    }
    MPI_Allreduce(parts, lux, n, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    for (int row = 0; row < n; row++) most = fmax(most, fabs(lux[row] - sums[row]));
    free(parts);
    free(sums);
    return most;
}

static int lu(const struct size *size, int iteration) {
    int n = size->rows, own = n / processes;
    double *columns = need((size_t)own * n * sizeof *columns),
           *panel = need((size_t)PANEL * n * sizeof *panel);
    for (int j = 0; j < own; j++)
        for (int row = 0; row < n; row++)
            columns[(size_t)j * n + row] = entry(iteration, n, row, column_of(j));
    for (int first = 0; first < n; first += PANEL) {
        int owner = first / PANEL % processes, local = first / PANEL / processes * PANEL;
        double *of = columns + (size_t)local * n;
        if (rank == owner) {
            factorise(of, n, first);
            memcpy(panel, of, (size_t)PANEL * n * sizeof *panel);
        }
        pass_on(panel, PANEL * n, owner);
        for (int j = 0; j < own; j++)
            if (column_of(j) >= first + PANEL) update(columns + (size_t)j * n, panel, n, first);
    }
    int right = residual(columns, n, own, iteration) < 1e-13 * n * n;
    free(columns);
    free(panel);
    return everywhere(right);
}

/* All. */

static const struct {
    const char *name;
    int (*iterate)(const struct size *, int);
} KERNELS[] = {{"is", is}, {"ft", ft}, {"lu", lu}};

/* Connections are made when they are first used: all of them, here. */
static void connect_all(void) {
    for (int p = 0; p < processes; p++) {
        int in, to = (rank + p) % processes, from = (rank + processes - p) % processes;
        MPI_Sendrecv(&rank, 1, MPI_INT, to, 3, &in, 1, MPI_INT, from, 3, MPI_COMM_WORLD,
                     MPI_STATUS_IGNORE);
    }
}

static long long now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000ll + now.tv_nsec / 1000;
}

static void wait_for(const char *file) {
    for (long long until = now_us() + 60000000; access(file, F_OK) != 0; usleep(2000))
        if (now_us() > until) {
            fprintf(stderr, "mpi_kernels: no file %s within 60 s\n", file);
            MPI_Abort(MPI_COMM_WORLD, 2);
        }
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &processes);
    const struct size *size = NULL;
    int (*iterate)(const struct size *, int) = NULL;
    char *end = NULL;
    long iterations = argc > 3 ? strtol(argv[3], &end, 10) : 0;
    int right = (argc == 4 || argc == 5) && strlen(argv[2]) == 1 && !*end && iterations >= 1 &&
                iterations <= 1000000;
    for (size_t i = 0; right && i < sizeof KERNELS / sizeof *KERNELS; i++)
        if (strcmp(argv[1], KERNELS[i].name) == 0) iterate = KERNELS[i].iterate;
    for (size_t i = 0; right && i < sizeof SIZES / sizeof *SIZES; i++)
        if (SIZES[i].name == *argv[2]) size = &SIZES[i];
    if (!size || !iterate)
        fail("usage: mpi_kernels is|ft|lu S|W|A|B ITERATIONS [FILE], 1 to 1000000 iterations");
    if (size->points % processes || size->rows % (processes * PANEL))
        fail("the number of processes must be 1, 2, 4 or 8");
    connect_all();
    int verified = iterate(size, 0);
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) puts("{\"connected\": true}"), fflush(stdout);
    if (argc == 5) wait_for(argv[4]);
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) printf("{\"began_us\": %lld}\n", now_us()), fflush(stdout);
    double began = MPI_Wtime();
    for (int i = 1; i <= iterations; i++) verified &= iterate(size, i);
    double seconds = MPI_Wtime() - began;
    if (rank == 0)
        printf("{\"kernel\": \"%s\", \"size\": \"%s\", \"processes\": %d, \"iterations\": %ld, "
               "\"seconds\": %.6f, \"verified\": %s}\n",
               argv[1], argv[2], processes, iterations, seconds, verified ? "true" : "false"),
            fflush(stdout);
    MPI_Finalize();
    return verified ? 0 : 1;
}
