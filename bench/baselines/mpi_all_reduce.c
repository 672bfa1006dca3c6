/* A rank that measures MPI_Allreduce, as bench/ranks/all_reduce.cc measures Group::all_reduce. Serves requests as
   described in bench/harness/benchmark_job.h. Measures in place and between two buffers, and returns the times of the
   faster variant. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static float *data, *result;

static void run(long count, int in_place) {
  if (in_place)
    MPI_Allreduce(MPI_IN_PLACE, data, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  else
    MPI_Allreduce(data, result, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

static int ascending(const void* a, const void* b) {
  const double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

static double median(const double* seconds, int samples) {
  double sorted[1024];
  memcpy(sorted, seconds, (size_t)samples * sizeof(double));
  qsort(sorted, (size_t)samples, sizeof(double), ascending);
  return sorted[samples / 2];
}

static void measure(long count, long repetitions, int samples, int in_place, double* seconds) {
  run(count, in_place);
  for (int i = 0; i < samples; ++i) {
    MPI_Barrier(MPI_COMM_WORLD);
    const double begin = MPI_Wtime();
    for (long k = 0; k < repetitions; ++k) run(count, in_place);
    seconds[i] = (MPI_Wtime() - begin) / (double)repetitions;
  }
}

/* Checks that both variants compute the sum. */
static void check(long count, int rank, int size) {
  for (int in_place = 0; in_place < 2; ++in_place) {
    for (long i = 0; i < count; ++i) data[i] = (float)(rank + 1);
    run(count, in_place);
    const float* sum = in_place ? data : result;
    for (long i = 0; i < count; ++i)
      if (sum[i] != (float)(size * (size + 1) / 2)) {
        fprintf(stderr, "MPI_Allreduce: wrong sum\n");
        MPI_Abort(MPI_COMM_WORLD, 1);
      }
  }
  memset(data, 0, (size_t)count * sizeof(float));
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank, size;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (argc != 3) {
    fprintf(stderr, "usage: mpi_all_reduce PREFIX BYTES\n");
    MPI_Abort(MPI_COMM_WORLD, 64);
  }
  const long max_count = atol(argv[2]) / (long)sizeof(float);
  if (posix_memalign((void**)&data, 4096, (size_t)max_count * sizeof(float)) ||
      posix_memalign((void**)&result, 4096, (size_t)max_count * sizeof(float)))
    MPI_Abort(MPI_COMM_WORLD, 1);
  memset(result, 0, (size_t)max_count * sizeof(float));
  check(max_count, rank, size);

  char path[4096];
  snprintf(path, sizeof path, "%s.%d.pid", argv[1], rank);
  FILE* pid = fopen(path, "w");
  if (pid) {
    fprintf(pid, "%d", (int)getpid());
    fclose(pid);
  }
  snprintf(path, sizeof path, "%s.%d", argv[1], rank);
  FILE* requests = fopen(path, "r");
  snprintf(path, sizeof path, "%s.answers", argv[1]);
  FILE* results = rank == 0 ? fopen(path, "w") : NULL;
  if (!requests || (rank == 0 && !results)) MPI_Abort(MPI_COMM_WORLD, 1);
  if (results) {
    fprintf(results, "\n");
    fflush(results);
  }
  long bytes, repetitions, samples;
  while (fscanf(requests, "%ld %ld %ld", &bytes, &repetitions, &samples) == 3 && samples > 0 && samples <= 512) {
    double in_place[512], copying[512];
    const long count = bytes / (long)sizeof(float);
    measure(count, repetitions, (int)samples, 1, in_place);
    measure(count, repetitions, (int)samples, 0, copying);
    const double* better = median(in_place, (int)samples) < median(copying, (int)samples) ? in_place : copying;
    if (!results) continue;
    for (int i = 0; i < (int)samples; ++i) fprintf(results, "%.9g ", better[i]);
    fprintf(results, "\n");
    fflush(results);
  }
  MPI_Finalize();
  return 0;
}
