// The MPI transport: calls libmpi directly, for ranks that an MPI launcher started. Each function of this header loads
// libmpi if it is not loaded.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/interface/transport.h"
#include "lockstep/job/store.h"

namespace lockstep::comm::mpi {

struct MpiOptions {
  std::shared_ptr<job::Store> store = nullptr;        ///< that of the job; keys begin with "mpi/NAME/" or "mpi order/"
  std::string name = {};                              ///< unique in the job
  std::vector<int> members = {};                      ///< world ranks, equal to the ranks of MPI_COMM_WORLD
  int rank = 0;                                       ///< index of this rank in `members`
  base::Deadline deadline = base::Deadline::never();  ///< for connecting the members
};

/// Returns an empty string if the ranks can use MPI, otherwise the reason: for example that no MPI launcher started
/// them, that the launcher of another MPI implementation did, or that no MPI library can be loaded.
std::string mpi_unavailable_reason();

/// Throws UsageError (kConfigMismatch) if the loaded MPI library is not the one of this build; the error names both.
/// Call it before MPI is initialised.
void check_mpi_library();

/// Initialises MPI. Throws UsageError (kConfigMismatch) if this process is not rank `rank` of `size` in MPI_COMM_WORLD;
/// the error names the MPI library and both ranks. With a launcher of another MPI implementation each process is a
/// world of one.
void init_mpi(int rank, int size);

/// Makes a transport that uses MPI's nonblocking operations on a communicator of its own. Operations make progress
/// while a thread waits for one or starts one; the transport has no threads. float16 and bfloat16 are added in float32
/// and rounded after each addition, in the order that MPI chooses. Blocks until all members have called it, and
/// while other communicators of the job are created: threads may call it at the same time, in different orders on
/// different ranks. Throws CommError if a member does not call it, and UsageError if this process has another rank in
/// MPI_COMM_WORLD.
///
/// The first call initialises MPI, unless the program has done so, and registers its finalisation at exit. After an
/// abort the transport does not wait for MPI: the operations in flight stay allocated, and the process exits within 5 s
/// even if MPI_Finalize() does not return.
std::shared_ptr<Transport> make_mpi_transport(const MpiOptions& options);

/// Returns `text` of rank 0 of MPI_COMM_WORLD on all of its ranks, which must all call it. Throws CommError with
/// kJoinTimeout at the deadline.
std::string broadcast_over_mpi(const std::string& text, base::Deadline deadline);
/// Returns true if all ranks of MPI_COMM_WORLD, which must all call it, are on one host. Blocks until they have.
bool is_mpi_world_on_one_host();

}  // namespace lockstep::comm::mpi
