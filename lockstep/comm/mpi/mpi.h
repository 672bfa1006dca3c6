// MPI as a transport: libmpi itself, for ranks that mpirun started.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/interface/transport.h"
#include "lockstep/job/store.h"

namespace lockstep::comm {

struct MpiOptions {
  std::shared_ptr<job::Store> store;                  ///< for this transport alone
  std::vector<int> members;                           ///< world ranks, which are those of MPI_COMM_WORLD
  int rank = 0;                                       ///< here
  base::Deadline deadline = base::Deadline::never();  ///< for the others to come
};

/// Empty when the ranks can use it, else why not. Two of its reasons: no launcher of MPI has started them, or that of
/// another MPI.
std::string mpi_unavailable_reason();

/// Throws UsageError (kConfigMismatch), naming both, when the MPI library that is loaded is not the one that this build
/// was made with. What starts MPI calls it.
void check_mpi_library();

/// Initialises MPI. Throws UsageError, naming library and launcher, when it numbers this process otherwise than as
/// `rank` of `size`, as MPI does when the launcher is none of its own: each process is then a world of one.
void init_mpi(int rank, int size);

/// Operations are MPI's nonblocking ones, on a communicator of their own; they advance while somebody waits for one or
/// starts one, and no thread is made. float16 and bfloat16 are added in float32 and rounded after each addition, in
/// MPI's order. Waits for the other members. Throws CommError when one does not come, UsageError when ranks have other
/// numbers in MPI_COMM_WORLD.
///
/// MPI is initialised by the first call, unless the program has done so, and finalised at exit. After an abort nobody
/// waits for MPI: what it had in hand stays allocated, and the process exits within 5 s whether MPI's end comes or not.
std::shared_ptr<Transport> make_mpi_transport(const MpiOptions& options);

/// `text` of rank 0 of MPI_COMM_WORLD, on all ranks of it; all of them call it. Throws CommError kJoinTimeout.
std::string broadcast_over_mpi(const std::string& text, base::Deadline deadline);
/// All ranks of MPI_COMM_WORLD call it: whether they are on one host.
bool is_mpi_world_on_one_host();

}  // namespace lockstep::comm
