#include "lockstep/base/error.h"
#include "lockstep/comm/mpi/mpi.h"

namespace lockstep::comm {

std::string mpi_missing() { return "this build has no MPI (Debian's package libopenmpi-dev brings it)"; }

std::shared_ptr<Transport> make_mpi_transport(const MpiOptions&) { throw base::UsageError(mpi_missing()); }
std::string broadcast_by_mpi(const std::string&, base::Deadline) { throw base::UsageError(mpi_missing()); }
bool mpi_has_one_host() { throw base::UsageError(mpi_missing()); }

}  // namespace lockstep::comm
