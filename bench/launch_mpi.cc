// Does the same as launch_rank.cc with MPI: rank 0 prints the time when all ranks have joined. Started by
// launch_time.py.
#define OMPI_SKIP_MPICXX  // the C++ bindings require another library
#include <mpi.h>

#include <chrono>
#include <cstdio>

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  MPI_Barrier(MPI_COMM_WORLD);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (rank == 0) {
    std::printf("%lld\n", static_cast<long long>(std::chrono::steady_clock::now().time_since_epoch().count()));
    std::fflush(stdout);
  }
  MPI_Finalize();
  return 0;
}
