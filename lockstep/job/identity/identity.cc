#include "lockstep/job/identity/identity.h"

#include <climits>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/job/identity/node_list.h"

namespace lockstep::job {
namespace {

using base::Env;
using base::UsageError;

constexpr int kMaxRanks = 1 << 20;
constexpr std::int64_t kMaxSlurmId = 0xffffffff;
constexpr std::int64_t kFirstSpecialStep =
    0xfffffff0;  // SLURM's numbers for what is no step of srun: a batch script, the shell of salloc
constexpr std::int64_t kFirstPort = 15000;  // below those that systems give to outgoing connections
constexpr std::int64_t kNumPorts = 10000;

const std::string& required(const char* contract, const char* name, const Env::Value& value) {
  if (!value)
    throw UsageError(std::string(name) + " is not set, but other variables of the contract " + contract + " are",
                     "set all of them or none; LOCKSTEP_ENV_FROM=none starts a world of one");
  return *value;
}

/// Rank and size as one contract gives them, checked against each other.
void read_ranks(Identity& id, const char* rank_name, const Env::Value& rank, const char* size_name,
                const Env::Value& size) {
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
  id.generation =
      static_cast<int>(base::parse_int_in("LOCKSTEP_GENERATION", env.lockstep_generation.value_or("0"), 0, INT_MAX));
  return id;
}

Identity from_torchrun(const Env& env, const char* contract) {
  Identity id{.contract = contract};
  read_ranks(id, "RANK", env.rank, "WORLD_SIZE", env.world_size);
  read_place("LOCAL_RANK", env.local_rank, "LOCAL_WORLD_SIZE", env.local_world_size, id.local_rank,
             id.local_world_size);
  read_place("GROUP_RANK", env.group_rank, "GROUP_WORLD_SIZE", env.group_world_size, id.node_rank, id.num_nodes);
  const bool agent_store = env.torchelastic_run_id && env.torchelastic_use_agent_store == "True";
  if (id.world_size == 1 && !agent_store) return id;
  id.store = agent_store ? StoreKind::kTorchrun : StoreKind::kRankZero;
  id.address.host = required(contract, "MASTER_ADDR", env.master_addr);
  id.address.port = static_cast<std::uint16_t>(
      base::parse_int_in("MASTER_PORT", required(contract, "MASTER_PORT", env.master_port), 1, 65535));
  id.job = env.torchelastic_run_id.value_or("0");
  id.generation = static_cast<int>(
      base::parse_int_in("TORCHELASTIC_RESTART_COUNT", env.torchelastic_restart_count.value_or("0"), 0, INT_MAX));
  return id;
}

/// Where rank 0 serves the store, for launchers that do not say, as far as the user does.
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
  read_place("OMPI_COMM_WORLD_LOCAL_RANK", env.ompi_comm_world_local_rank, "OMPI_COMM_WORLD_LOCAL_SIZE",
             env.ompi_comm_world_local_size, id.local_rank, id.local_world_size);
  read_meeting_point(id, env, env.pmix_namespace.value_or("0"));
  return id;
}

Identity from_pmi(const Env& env) {
  Identity id{.contract = "pmi"};
  read_ranks(id, "PMI_RANK", env.pmi_rank, "PMI_SIZE", env.pmi_size);
  read_place("MPI_LOCALRANKID", env.mpi_localrankid, "MPI_LOCALNRANKS", env.mpi_localnranks, id.local_rank,
             id.local_world_size);
  read_meeting_point(id, env, env.pmi_jobid.value_or("0"));
  return id;
}

/// PMIx tells the size by a call of its library only.
Identity from_pmix(const Env& env) {
  Identity id{.contract = "pmix"};
  const bool by_open_mpi = env.ompi_comm_world_size.has_value();
  if (!by_open_mpi && !env.slurm_ntasks)
    throw UsageError(
        "PMIX_RANK is " + base::quoted(env.pmix_rank.value_or(""), 80) +
            ", but no variable tells the number of ranks: neither OMPI_COMM_WORLD_SIZE nor SLURM_NTASKS is set",
        "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or give them to init(); LOCKSTEP_ENV_FROM=none starts a "
        "world of one");
  read_ranks(id, "PMIX_RANK", env.pmix_rank, by_open_mpi ? "OMPI_COMM_WORLD_SIZE" : "SLURM_NTASKS",
             by_open_mpi ? env.ompi_comm_world_size : env.slurm_ntasks);
  read_meeting_point(id, env, required("pmix", "PMIX_NAMESPACE", env.pmix_namespace));
  return id;
}

/// The number of this host, and of its tasks among the step's.
void read_slurm_places(Identity& id, const Env& env) {
  read_place("SLURM_NODEID", env.slurm_nodeid, "SLURM_STEP_NUM_NODES", env.slurm_step_num_nodes, id.node_rank,
             id.num_nodes);
  Env::Value tasks_here;
  if (env.slurm_step_tasks_per_node && id.node_rank >= 0) {
    const std::vector<int> tasks = expand_counts("SLURM_STEP_TASKS_PER_NODE", *env.slurm_step_tasks_per_node);
    if (static_cast<std::size_t>(id.node_rank) >= tasks.size())
      throw UsageError("SLURM_NODEID is " + std::to_string(id.node_rank) + ", but SLURM_STEP_TASKS_PER_NODE is " +
                       base::quoted(*env.slurm_step_tasks_per_node, 80) + ", which is of " +
                       std::to_string(tasks.size()) + (tasks.size() == 1 ? " host" : " hosts"));
    tasks_here = std::to_string(tasks[static_cast<std::size_t>(id.node_rank)]);
  }
  read_place("SLURM_LOCALID", env.slurm_localid, "this host's part of SLURM_STEP_TASKS_PER_NODE", tasks_here,
             id.local_rank, id.local_world_size);
}

Identity from_slurm(const Env& env) {
  Identity id{.contract = "slurm"};
  read_ranks(id, "SLURM_PROCID", env.slurm_procid, "SLURM_NTASKS", env.slurm_ntasks);
  const std::int64_t job =
      base::parse_int_in("SLURM_JOB_ID", required("slurm", "SLURM_JOB_ID", env.slurm_job_id), 0, kMaxSlurmId);
  const std::int64_t step = base::parse_int_in("SLURM_STEP_ID", required("slurm", "SLURM_STEP_ID", env.slurm_step_id),
                                               0, kFirstSpecialStep - 1);
  read_slurm_places(id, env);
  id.generation =
      static_cast<int>(base::parse_int_in("SLURM_RESTART_COUNT", env.slurm_restart_count.value_or("0"), 0, INT_MAX));
  read_meeting_point(id, env, "slurm-" + std::to_string(job) + "." + std::to_string(step));
  if (id.world_size == 1 || !id.address.host.empty()) return id;
  // All tasks come to the same without a word. On one host its name need not be known to anybody.
  id.address.host = id.num_nodes == 1 ? "127.0.0.1"
                                      : expand_hosts("SLURM_STEP_NODELIST",
                                                     required("slurm", "SLURM_STEP_NODELIST", env.slurm_step_nodelist))
                                            .front();
  id.address.port = slurm_port(job, step);
  return id;
}

/// Whether srun has started this process, as far as it says; a batch script and the shell of salloc have a SLURM_PROCID
/// too.
bool in_slurm_step(const Env& env) {
  return env.slurm_procid && env.slurm_step_id && base::parse_int(*env.slurm_step_id).value_or(0) < kFirstSpecialStep;
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

/// The contract whose variables are there: the first in the order of the header.
std::string_view contract_in(const Env& env) {
  const bool by_slurm = in_slurm_step(env);
  const bool by_pmi = env.pmi_rank || env.pmi_size;
  const bool by_open_mpi = env.ompi_comm_world_rank || (env.ompi_comm_world_size && !env.pmix_rank);
  const bool numbered =
      by_open_mpi || by_slurm || by_pmi || env.pmix_rank;  // by one whose ranks get LOCKSTEP_STORE alone
  if (env.lockstep_rank || env.lockstep_world_size || (env.lockstep_store && !numbered)) return "lockstep";
  if (env.torchelastic_run_id) return "torchrun";
  if (env.rank || env.world_size) return "env://";
  if (by_open_mpi) return "mpi";
  // hydra starts its daemons by srun, and their step is not that of the ranks. srun with a plugin for PMI numbers its
  // tasks alike in both.
  if (by_slurm && !(by_pmi && env.mpi_localrankid)) return "slurm";
  if (by_pmi) return "pmi";
  return env.pmix_rank ? "pmix" : "none";
}

/// What LOCKSTEP_ENV_FROM means by `name`.
std::string_view contract_named(const char* who_names_it, const std::string& name, const Env& env) {
  if (name == "pmi") return env.pmix_rank && !env.pmi_rank ? "pmix" : "pmi";
  for (const std::string_view contract : {"none", "lockstep", "torchrun", "mpi", "slurm"})
    if (name == contract) return contract;
  throw UsageError(std::string(who_names_it) + " is " + base::quoted(name, 80) +
                   "; allowed are auto, none, lockstep, torchrun, mpi, slurm and pmi");
}

}  // namespace

std::uint16_t slurm_port(std::int64_t job, std::int64_t step) {
  return static_cast<std::uint16_t>(kFirstPort + (101 * job + step) % kNumPorts);
}

std::string_view contract_of(const Env& env) {
  const std::string from = env.lockstep_env_from.value_or("auto");
  if (from != "auto") return contract_named("LOCKSTEP_ENV_FROM", from, env);
  const std::string_view contract = contract_in(env);
  return contract == "none" ? "" : contract;
}

Identity identify(const Env& env, const ExplicitIdentity& given) {
  if (given.rank || given.world_size || !given.address.empty()) return from_program(given);
  const bool by_program = !given.env_from.empty();
  const std::string from = by_program ? given.env_from : env.lockstep_env_from.value_or("auto");
  const std::string_view contract =
      from == "auto" ? contract_in(env)
                     : contract_named(by_program ? "InitOptions.env_from" : "LOCKSTEP_ENV_FROM", from, env);
  if (contract == "lockstep") return from_lockstep(env);
  if (contract == "torchrun" || contract == "env://")
    return from_torchrun(env, contract == "torchrun" ? "torchrun" : "env://");
  if (contract == "mpi") return from_mpi(env);
  if (contract == "slurm") return from_slurm(env);
  if (contract == "pmi") return from_pmi(env);
  if (contract == "pmix") return from_pmix(env);
  return {.contract = "none"};
}

}  // namespace lockstep::job
