// The identity of this process in its job (rank, world size, store address), from the variables that its launcher set
// or from the program's options.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/env.h"
#include "lockstep/base/net/socket.h"

namespace lockstep::job::identity {

/// Which process serves the job's store.
enum class StoreKind {
  kLocal,     ///< no server: a world of size one
  kLauncher,  ///< the Lockstep launcher serves it at `address`
  kRankZero,  ///< rank 0 serves it at `address`
  kTorchrun,  ///< rank 0 serves it, and publishes its address in torchrun's own c10d store at `address`
};

/// The rank of this process and its position among the hosts. Members that are -1 or empty are unknown until
/// job::join() has compared the hosts of all ranks.
struct Identity {
  /// Where the values come from: "lockstep", "torchrun", "env://", "mpi", "slurm", "pmi", "pmix", "pod", "explicit"
  /// or "none".
  std::string source;
  int rank = 0;
  int world_size = 1;
  int local_rank = -1;            ///< index among the ranks of this host
  int local_world_size = -1;      ///< number of ranks on this host
  int node_rank = -1;             ///< index of this host
  int num_nodes = -1;             ///< number of hosts
  std::vector<int> local_ranks;   ///< the ranks on this host in ascending order, including this one
  std::vector<int> host_indices;  ///< the index of each rank's host. Ranks on one host can share memory. Hosts are
                                  ///< numbered from 0 in the order of their first ranks
  StoreKind store = StoreKind::kLocal;
  base::net::Address address{};
  std::string job = "0";  ///< name that distinguishes two jobs at one address
  int generation = 0;     ///< how many times the launcher has started this job before
};

/// Values that the program passes to init(). They override the environment.
struct ExplicitIdentity {
  std::optional<int> rank;
  std::optional<int> world_size;
  std::string address;   ///< "host:port" of rank 0
  std::string env_from;  ///< overrides LOCKSTEP_ENV_FROM; ignored if another member is set
};

/// Determines the identity of a process. Pure. Uses the first of these sources that is present: `given`, Lockstep's
/// variables, torchrun's, plain RANK and WORLD_SIZE (env://), Open MPI's, those of a SLURM step, PMI's, PMIx's, those
/// of a pod (pod.h). Without any of them, the process is a world of size one. PMI precedes SLURM if Hydra set the
/// variables of PMI, because then the SLURM step consists of Hydra's daemons. LOCKSTEP_ENV_FROM selects one source; its
/// value "pmi" selects PMIx if PMI_RANK is not set.
///
/// The variables of MPI, PMI and SLURM do not contain the address of the store. With these sources, the address is
/// LOCKSTEP_STORE, else MASTER_ADDR and MASTER_PORT. If none of these is set, a SLURM step uses its first host
/// (127.0.0.1 if it has only one) and slurm_port(); for MPI and PMI the address stays empty, and init() exchanges it
/// through PMI or MPI.
///
/// Throws a UsageError that names the variable, its value and the expected values if variables are missing or
/// contradict each other.
Identity identify(const base::Env& env, const ExplicitIdentity& given = {});

/// Returns the source that identify() reads, without validating its values: "lockstep", "torchrun", "env://", "mpi",
/// "slurm", "pmi", "pmix", "pod", or "none" if LOCKSTEP_ENV_FROM selects it. Returns "" if no launcher started this
/// process as a rank, so that it may start ranks of its own. Throws UsageError if LOCKSTEP_ENV_FROM or a variable of a
/// pod is invalid.
std::string_view identity_source(const base::Env& env);

/// Returns the port on which rank 0 of a SLURM step listens, from 15000 to 24999. Up to 10000 consecutive steps of a
/// job get different ports.
std::uint16_t slurm_port(std::int64_t job, std::int64_t step);

}  // namespace lockstep::job::identity
