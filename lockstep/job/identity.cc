#include "lockstep/job/identity.h"

#include <climits>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"

namespace lockstep::job {
namespace {

using base::Env;
using base::UsageError;

constexpr int kMaxRanks = 1 << 20;

const std::string& required(const char* contract, const char* name, const Env::Value& value) {
  if (!value)
    throw UsageError(std::string(name) + " is not set, but other variables of the contract " + contract + " are",
                     "set all of them or none; LOCKSTEP_ENV_FROM=none starts a world of one");
  return *value;
}

/// Rank and size as one contract gives them, checked against each other.
void read_ranks(Identity& id, const char* rank_name, const Env::Value& rank, const char* size_name, const Env::Value& size) {
  const char* contract = id.contract.c_str();
  id.world_size = static_cast<int>(base::parse_int_in(size_name, required(contract, size_name, size), 1, kMaxRanks));
  id.rank = static_cast<int>(base::parse_int_in(rank_name, required(contract, rank_name, rank), 0, kMaxRanks));
  if (id.rank >= id.world_size)
    throw UsageError(std::string(rank_name) + " is " + std::to_string(id.rank) + ", but " + size_name + " is " +
                     std::to_string(id.world_size) + "; allowed is 0 to " + std::to_string(id.world_size - 1));
}

/// A place among `count`; both must be given, or neither (-1, -1).
void read_place(const char* place_name, const Env::Value& place, const char* count_name, const Env::Value& count,
                int& place_out, int& count_out) {
  if (!place && !count) return;
  if (count) count_out = static_cast<int>(base::parse_int_in(count_name, *count, 1, kMaxRanks));
  if (place) place_out = static_cast<int>(base::parse_int_in(place_name, *place, 0, kMaxRanks));
  if (count && place && place_out >= count_out)
    throw UsageError(std::string(place_name) + " is " + *place + ", but " + count_name + " is " + *count);
}

Identity from_lockstep(const Env& env) {
  Identity id{.contract = "lockstep"};
  read_ranks(id, "LOCKSTEP_RANK", env.lockstep_rank, "LOCKSTEP_WORLD_SIZE", env.lockstep_world_size);
  read_place("LOCKSTEP_LOCAL_RANK", env.lockstep_local_rank, "LOCKSTEP_LOCAL_WORLD_SIZE", env.lockstep_local_world_size,
             id.local_rank, id.local_world_size);
  read_place("LOCKSTEP_NODE_RANK", env.lockstep_node_rank, "LOCKSTEP_NUM_NODES", env.lockstep_num_nodes, id.node_rank,
             id.num_nodes);
  id.store = StoreKind::kLauncher;
  id.address = base::parse_address("LOCKSTEP_STORE", required("lockstep", "LOCKSTEP_STORE", env.lockstep_store));
  id.job = required("lockstep", "LOCKSTEP_JOB", env.lockstep_job);
  return id;
}

Identity from_torchrun(const Env& env, const char* contract) {
  Identity id{.contract = contract};
  read_ranks(id, "RANK", env.rank, "WORLD_SIZE", env.world_size);
  read_place("LOCAL_RANK", env.local_rank, "LOCAL_WORLD_SIZE", env.local_world_size, id.local_rank, id.local_world_size);
  read_place("GROUP_RANK", env.group_rank, "GROUP_WORLD_SIZE", env.group_world_size, id.node_rank, id.num_nodes);
  const bool agent_store = env.torchelastic_run_id && env.torchelastic_use_agent_store == "True";
  if (id.world_size == 1 && !agent_store) return id;
  id.store = agent_store ? StoreKind::kTorchrun : StoreKind::kRankZero;
  id.address.host = required(contract, "MASTER_ADDR", env.master_addr);
  id.address.port = static_cast<std::uint16_t>(
      base::parse_int_in("MASTER_PORT", required(contract, "MASTER_PORT", env.master_port), 1, 65535));
  id.job = env.torchelastic_run_id.value_or("0");
  id.generation = static_cast<int>(base::parse_int_in("TORCHELASTIC_RESTART_COUNT", env.torchelastic_restart_count.value_or("0"), 0, INT_MAX));
  return id;
}

/// Where rank 0 serves the store, for launchers that do not say.
void read_meeting_point(Identity& id, const Env& env, const std::string& job) {
  id.job = job;
  if (id.world_size == 1) return;
  id.store = StoreKind::kRankZero;
  if (env.lockstep_store) {
    id.address = base::parse_address("LOCKSTEP_STORE", *env.lockstep_store);
    return;
  }
  if (!env.master_addr && !env.master_port) return;  // MPI is asked
  id.address.host = required(id.contract.c_str(), "MASTER_ADDR", env.master_addr);
  id.address.port = static_cast<std::uint16_t>(
      base::parse_int_in("MASTER_PORT", required(id.contract.c_str(), "MASTER_PORT", env.master_port), 1, 65535));
}

Identity from_mpi(const Env& env) {
  Identity id{.contract = "mpi"};
  read_ranks(id, "OMPI_COMM_WORLD_RANK", env.ompi_comm_world_rank, "OMPI_COMM_WORLD_SIZE", env.ompi_comm_world_size);
  read_place("OMPI_COMM_WORLD_LOCAL_RANK", env.ompi_comm_world_local_rank, "OMPI_COMM_WORLD_LOCAL_SIZE", env.ompi_comm_world_local_size,
             id.local_rank, id.local_world_size);
  read_meeting_point(id, env, env.pmix_namespace.value_or("0"));
  return id;
}

Identity from_pmi(const Env& env) {
  Identity id{.contract = "pmi"};
  read_ranks(id, "PMI_RANK", env.pmi_rank, "PMI_SIZE", env.pmi_size);
  read_meeting_point(id, env, env.pmi_jobid.value_or("0"));
  return id;
}

Identity from_program(const ExplicitIdentity& given) {
  Identity id{.contract = "explicit"};
  const auto text = [](const std::optional<int>& value) -> Env::Value {
    return value ? Env::Value(std::to_string(*value)) : std::nullopt;
  };
  read_ranks(id, "InitOptions.rank", text(given.rank), "InitOptions.world_size", text(given.world_size));
  if (id.world_size == 1) return id;
  if (given.address.empty())
    throw UsageError("InitOptions.address is empty, but world_size is " + std::to_string(id.world_size) +
                     "; allowed is host:port of rank 0");
  id.store = StoreKind::kRankZero;
  id.address = base::parse_address("InitOptions.address", given.address);
  return id;
}

}  // namespace

Identity identify(const Env& env, const ExplicitIdentity& given) {
  if (given.rank || given.world_size || !given.address.empty()) return from_program(given);
  const std::string from = env.lockstep_env_from.value_or("auto");
  if (from == "none") return {.contract = "none"};
  if (from == "lockstep") return from_lockstep(env);
  if (from == "torchrun") return from_torchrun(env, "torchrun");
  if (from == "mpi") return from_mpi(env);
  if (from == "pmi") return from_pmi(env);
  if (from != "auto")
    throw UsageError("LOCKSTEP_ENV_FROM is " + base::quoted(from, 80) + "; allowed are none, lockstep, torchrun, mpi and pmi");
  const bool by_mpi = env.ompi_comm_world_rank || env.pmi_rank;  // whose ranks get LOCKSTEP_STORE alone
  if (env.lockstep_rank || env.lockstep_world_size || (env.lockstep_store && !by_mpi)) return from_lockstep(env);
  if (env.torchelastic_run_id) return from_torchrun(env, "torchrun");
  if (env.rank || env.world_size) return from_torchrun(env, "env://");
  if (env.ompi_comm_world_rank) return from_mpi(env);
  if (env.pmi_rank) return from_pmi(env);
  return {.contract = "none"};
}

}  // namespace lockstep::job
