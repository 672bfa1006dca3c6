// Who this process is: read from what its launcher set, or from what the program says.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/env.h"
#include "lockstep/base/net/socket.h"

namespace lockstep::job {

/// Where the ranks' common store is.
enum class StoreKind {
  kLocal,     ///< a world of one: none is needed
  kLauncher,  ///< the Lockstep launcher serves it at `address`
  kRankZero,  ///< rank 0 serves it at `address`
  kTorchrun,  ///< rank 0 serves it; torchrun's own c10d store at `address` says where
};

struct Identity {
  std::string
      source;  ///< "lockstep", "torchrun", "env://", "mpi", "slurm", "pmi", "pmix", "explicit" or "none": who told us
  int rank = 0;
  int world_size = 1;
  int local_rank = -1;            ///< -1: not told; job::join() finds it by counting who shares the host
  int local_world_size = -1;      ///< likewise
  int node_rank = -1;             ///< likewise
  int num_nodes = -1;             ///< likewise
  std::vector<int> local_ranks;   ///< the ranks on this host, this one included, ascending; job::join() finds them
  std::vector<int> host_indices;  ///< of each rank, the number of its host, as far as sharing memory goes; numbered
                                  ///< from 0 as their first ranks come; job::join() finds them
  StoreKind store = StoreKind::kLocal;
  base::Address address{};
  std::string job = "0";  ///< keeps two jobs at one address apart
  int generation = 0;     ///< how often the launcher has started this job before
};

/// What a program may say itself; it outranks the environment.
struct ExplicitIdentity {
  std::optional<int> rank;
  std::optional<int> world_size;
  std::string address;   ///< "host:port" of rank 0
  std::string env_from;  ///< as LOCKSTEP_ENV_FROM, which it outranks; counts when the others say nothing
};

/// Pure. Order: `given`, Lockstep's variables, torchrun's, plain RANK and WORLD_SIZE (env://), Open MPI's, those of a
/// SLURM step, PMI's, PMIx's, a world of one; PMI's before SLURM's when hydra set them, whose daemons are the step.
/// LOCKSTEP_ENV_FROM forces one; "pmi" is PMIx where there is no PMI_RANK.
///
/// Those of MPI, PMI and SLURM say nothing of where to meet: LOCKSTEP_STORE does, or MASTER_ADDR and MASTER_PORT. With
/// neither a SLURM step meets at its first host (127.0.0.1 when it has one) and slurm_port(), and for the others the
/// address stays empty, and init() asks the launcher by PMI or MPI.
///
/// Half-set or contradictory values are a UsageError that names the variable, its value and what is allowed.
Identity identify(const base::Env& env, const ExplicitIdentity& given = {});

/// The contract that identify() reads, before any value is looked at: "lockstep", "torchrun", "env://", "mpi", "slurm",
/// "pmi", "pmix", or "none" when LOCKSTEP_ENV_FROM says so. Empty when no launcher has made this process a rank, so
/// that it may start ranks of its own. Throws UsageError for LOCKSTEP_ENV_FROM.
std::string_view identity_source(const base::Env& env);

/// Where rank 0 of a SLURM step listens: 15000 to 24999, another one for each of 10000 steps of a job that follow each
/// other.
std::uint16_t slurm_port(std::int64_t job, std::int64_t step);

}  // namespace lockstep::job
