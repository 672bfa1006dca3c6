// MPI as a transport: libmpi itself, for ranks that mpirun started.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/seam/transport.h"
#include "lockstep/job/store.h"

namespace lockstep::comm {

struct MpiOptions {
  std::shared_ptr<job::Store> store;  ///< for this transport alone
  std::vector<int> members;           ///< world ranks, which are those of MPI_COMM_WORLD
  int rank = 0;                       ///< here
  base::Deadline deadline = base::Deadline::never();  ///< for the others to come
};

/// Empty when it can be used, else why not.
std::string mpi_missing();

/// Operations are MPI's nonblocking ones, on a communicator of their own; they advance while somebody waits for one or starts one, and no
/// thread is made. float16 and bfloat16 are added in float32 and rounded after each addition, in MPI's order. Waits for the other members.
/// Throws CommError when one does not come, UsageError when ranks have other numbers in MPI_COMM_WORLD.
///
/// MPI is initialised by the first call, unless the program has done so, and finalised at exit. After an abort nobody waits for MPI: what
/// it had in hand stays allocated, and the process exits within 5 s whether MPI's end comes or not.
std::shared_ptr<Transport> make_mpi_transport(const MpiOptions& options);

/// `text` of rank 0 of MPI_COMM_WORLD, on all ranks of it; all of them call it. Throws CommError kJoinTimeout.
std::string broadcast_by_mpi(const std::string& text, base::Deadline deadline);
/// All ranks of MPI_COMM_WORLD call it: whether they are on one host.
bool mpi_has_one_host();

}  // namespace lockstep::comm
