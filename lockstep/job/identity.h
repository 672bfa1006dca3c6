// Who this process is: read from what its launcher set, or from what the program says.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/env.h"
#include "lockstep/base/socket.h"

namespace lockstep::job {

/// Where the ranks' common store is.
enum class StoreKind {
  kLocal,     ///< a world of one: none is needed
  kLauncher,  ///< the Lockstep launcher serves it at `address`
  kRankZero,  ///< rank 0 serves it at `address`
  kTorchrun,  ///< rank 0 serves it; torchrun's own c10d store at `address` says where
};

struct Identity {
  std::string contract;  ///< "lockstep", "torchrun", "env://", "mpi", "pmi", "explicit" or "none": who told us
  int rank = 0;
  int world_size = 1;
  int local_rank = -1;        ///< -1: not told; job::join() finds it by counting who shares the host
  int local_world_size = -1;  ///< likewise
  int node_rank = -1;         ///< likewise
  int num_nodes = -1;         ///< likewise
  std::vector<int> neighbours;  ///< the ranks on this host, this one included, ascending; job::join() finds them
  std::vector<int> hosts;  ///< of each rank, the number of its host, as far as sharing memory goes; numbered from 0 as their first ranks
                           ///< come; job::join() finds them
  StoreKind store = StoreKind::kLocal;
  base::Address address{};
  std::string job = "0";  ///< keeps two jobs at one address apart
  int generation = 0;     ///< how often the launcher has started this job before
};

/// What a program may say itself; it outranks the environment.
struct ExplicitIdentity {
  std::optional<int> rank;
  std::optional<int> world_size;
  std::string address;  ///< "host:port" of rank 0
};

/// Pure. Order: `given`, Lockstep's variables, torchrun's, plain RANK and WORLD_SIZE (env://), Open MPI's, PMI's, a
/// world of one. The two of MPI say nothing of where to meet: LOCKSTEP_STORE does, or MASTER_ADDR
/// and MASTER_PORT; with neither the address stays empty, and init() asks MPI itself.
/// LOCKSTEP_ENV_FROM forces one. Half-set or contradictory values are a UsageError that names the variable, its value and
/// what is allowed.
Identity identify(const base::Env& env, const ExplicitIdentity& given = {});

}  // namespace lockstep::job
