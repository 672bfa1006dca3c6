// mpi.h for a build without MPI.
#include "lockstep/base/error.h"
#include "lockstep/comm/mpi/mpi.h"

namespace lockstep::comm::mpi {

std::string mpi_unavailable_reason() {
  return "this build has no MPI (install the package libopenmpi-dev and build again)";
}

void check_mpi_library() {}
void init_mpi(int, int) { throw base::UsageError(mpi_unavailable_reason()); }
std::shared_ptr<Transport> make_mpi_transport(const MpiOptions&) { throw base::UsageError(mpi_unavailable_reason()); }
std::string broadcast_over_mpi(const std::string&, base::Deadline) { throw base::UsageError(mpi_unavailable_reason()); }
bool is_mpi_world_on_one_host() { throw base::UsageError(mpi_unavailable_reason()); }

}  // namespace lockstep::comm::mpi
