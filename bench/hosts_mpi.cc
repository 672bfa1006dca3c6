// A rank that measures MPI_Allreduce as bench/hosts_rank.cc measures Lockstep: bench_hosts_mpi BYTES RUNS.
#define OMPI_SKIP_MPICXX 1  // the C++ bindings are not linked
#include <mpi.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  if (argc != 3) {
    std::fprintf(stderr, "usage: bench_hosts_mpi BYTES RUNS\n");
    MPI_Abort(MPI_COMM_WORLD, 64);
  }
  const long bytes = std::atol(argv[1]);
  const int runs = std::atoi(argv[2]);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  std::vector<float> values(static_cast<std::size_t>(bytes) / 4, 0.0F);
  const auto call = [&] {
    MPI_Allreduce(MPI_IN_PLACE, values.data(), static_cast<int>(values.size()), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  };
  for (int warm = 0; warm < (bytes > (1 << 20) ? 1 : 100); ++warm) call();
  if (rank == 0) {
    std::puts("ready");
    std::fflush(stdout);
    std::string line;
    std::getline(std::cin, line);
  }
  MPI_Barrier(MPI_COMM_WORLD);
  std::vector<double> seconds;
  for (int run = 0; run < runs; ++run) {
    const double begin = MPI_Wtime();
    call();
    seconds.push_back(MPI_Wtime() - begin);
  }
  if (rank == 0) {
    std::printf("{\"transport\": \"openmpi\", \"seconds\": [");
    for (std::size_t i = 0; i < seconds.size(); ++i) std::printf("%s%.7f", i ? ", " : "", seconds[i]);
    std::printf("]}\n");
  }
  MPI_Finalize();
}
