#include "lockstep/job/identity/identity.h"

#include <climits>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/job/identity/node_list.h"
#include "lockstep/job/identity/pod.h"

namespace lockstep::job::identity {
namespace {

using base::Env;
using base::UsageError;

constexpr int kMaxRanks = 1 << 20;
constexpr std::int64_t kMaxSlurmId = 0xffffffff;
// From this step id on, SLURM's steps are not started by srun: they are batch scripts and shells of salloc.
constexpr std::int64_t kFirstSpecialStep = 0xfffffff0;
constexpr std::int64_t kFirstSlurmPort = 15000;  // below the ports that kernels assign to outgoing connections
constexpr std::int64_t kNumSlurmPorts = 10000;

const std::string& required(const char* source, const char* name, const Env::Value& value) {
  if (!value)
    throw UsageError(std::string(name) + " is not set, but other variables of the source " + source + " are",
                     "set all of them or none; LOCKSTEP_ENV_FROM=none starts a world of size one");
  return *value;
}

int parse_number(const char* name, const std::string& text, std::int64_t low, std::int64_t high) {
  return static_cast<int>(base::parse_int_in_range(name, text, low, high));
}

base::net::Address master_address(const char* source, const Env& env) {
  return {required(source, "MASTER_ADDR", env.master_addr),
          static_cast<std::uint16_t>(
              parse_number("MASTER_PORT", required(source, "MASTER_PORT", env.master_port), 1, 65535))};
}

/// Reads the rank and the world size from one source and checks them against each other.
void read_rank_and_size(Identity& id, const char* rank_name, const Env::Value& rank, const char* size_name,
                        const Env::Value& size) {
  const char* source = id.source.c_str();
  id.world_size = parse_number(size_name, required(source, size_name, size), 1, kMaxRanks);
  id.rank = parse_number(rank_name, required(source, rank_name, rank), 0, kMaxRanks);
  if (id.rank >= id.world_size)
    throw UsageError(std::string(rank_name) + " is " + std::to_string(id.rank) + ", but " + size_name + " is " +
                     std::to_string(id.world_size) + "; expected 0 to " + std::to_string(id.world_size - 1));
}

/// Reads an index and its count and checks them against each other. Leaves an output unchanged if its variable is not
/// set.
void read_index_and_count(const char* index_name, const Env::Value& index, const char* count_name,
                          const Env::Value& count, int& index_out, int& count_out) {
  if (!index && !count) return;
  if (count) count_out = parse_number(count_name, *count, 1, kMaxRanks);
  if (index) index_out = parse_number(index_name, *index, 0, kMaxRanks);
  if (count && index && index_out >= count_out)
    throw UsageError(std::string(index_name) + " is " + *index + ", but " + count_name + " is " + *count);
}

Identity from_lockstep(const Env& env) {
  Identity id{.source = "lockstep"};
  read_rank_and_size(id, "LOCKSTEP_RANK", env.lockstep_rank, "LOCKSTEP_WORLD_SIZE", env.lockstep_world_size);
  read_index_and_count("LOCKSTEP_LOCAL_RANK", env.lockstep_local_rank, "LOCKSTEP_LOCAL_WORLD_SIZE",
                       env.lockstep_local_world_size, id.local_rank, id.local_world_size);
  read_index_and_count("LOCKSTEP_NODE_RANK", env.lockstep_node_rank, "LOCKSTEP_NUM_NODES", env.lockstep_num_nodes,
                       id.node_rank, id.num_nodes);
  id.store = StoreKind::kLauncher;
  id.address = base::net::parse_address("LOCKSTEP_STORE", required("lockstep", "LOCKSTEP_STORE", env.lockstep_store));
  id.job = required("lockstep", "LOCKSTEP_JOB", env.lockstep_job);
  id.generation = parse_number("LOCKSTEP_GENERATION", env.lockstep_generation.value_or("0"), 0, INT_MAX);
  return id;
}

/// Throws UsageError if this is one of several processes that a torchrun inside a rank of lockstep run has started:
/// they all have the variables of that rank. lockstep run sets torchrun's variables as well, with its own job.
void check_no_inner_torchrun(const Env& env, const Identity& id) {
  if (!env.torchelastic_run_id || env.torchelastic_run_id == id.job || env.local_world_size.value_or("1") == "1")
    return;
  throw UsageError("torchrun has started this process inside rank " + std::to_string(id.rank) +
                       " of lockstep run, as one of " + *env.local_world_size + " with the same LOCKSTEP_RANK",
                   "use either lockstep run or torchrun; LOCKSTEP_ENV_FROM=torchrun makes these processes a world of "
                   "their own");
}

/// Throws UsageError if this process alone is in a pod for which the variables ask for several ranks.
void check_one_rank_per_pod(const Pod& pod) {
  if (pod.ranks_per_pod <= 1) return;
  throw UsageError("the variables of this pod ask for " + std::to_string(pod.ranks_per_pod) + " ranks in it (" +
                       pod.variables + "), but this process is one, without LOCAL_RANK",
                   "start the ranks of each pod with lockstep run or torchrun, which read these variables; "
                   "LOCKSTEP_ENV_FROM=torchrun takes RANK and WORLD_SIZE for those of this rank");
}

Identity from_torchrun(const Env& env, const char* source) {
  Identity id{.source = source};
  read_rank_and_size(id, "RANK", env.rank, "WORLD_SIZE", env.world_size);
  read_index_and_count("LOCAL_RANK", env.local_rank, "LOCAL_WORLD_SIZE", env.local_world_size, id.local_rank,
                       id.local_world_size);
  read_index_and_count("GROUP_RANK", env.group_rank, "GROUP_WORLD_SIZE", env.group_world_size, id.node_rank,
                       id.num_nodes);
  const bool agent_store = env.torchelastic_run_id && env.torchelastic_use_agent_store == "True";
  if (id.world_size == 1 && !agent_store) return id;
  id.store = agent_store ? StoreKind::kTorchrun : StoreKind::kRankZero;
  id.address = master_address(source, env);
  id.job = env.torchelastic_run_id.value_or("0");
  id.generation = parse_number("TORCHELASTIC_RESTART_COUNT", env.torchelastic_restart_count.value_or("0"), 0, INT_MAX);
  return id;
}

/// Reads the address of the store from the user's variables, for launchers that do not provide one.
void read_store_address(Identity& id, const Env& env, const std::string& job) {
  id.job = job;
  if (id.world_size == 1) return;
  id.store = StoreKind::kRankZero;
  if (env.lockstep_store) {
    id.address = base::net::parse_address("LOCKSTEP_STORE", *env.lockstep_store);
    return;
  }
  if (!env.master_addr && !env.master_port) return;  // init() exchanges the address by PMI or MPI
  id.address = master_address(id.source.c_str(), env);
}

Identity from_mpi(const Env& env) {
  Identity id{.source = "mpi"};
  read_rank_and_size(id, "OMPI_COMM_WORLD_RANK", env.ompi_comm_world_rank, "OMPI_COMM_WORLD_SIZE",
                     env.ompi_comm_world_size);
  read_index_and_count("OMPI_COMM_WORLD_LOCAL_RANK", env.ompi_comm_world_local_rank, "OMPI_COMM_WORLD_LOCAL_SIZE",
                       env.ompi_comm_world_local_size, id.local_rank, id.local_world_size);
  read_store_address(id, env, env.pmix_namespace.value_or("0"));
  return id;
}

Identity from_pmi(const Env& env) {
  Identity id{.source = "pmi"};
  read_rank_and_size(id, "PMI_RANK", env.pmi_rank, "PMI_SIZE", env.pmi_size);
  read_index_and_count("MPI_LOCALRANKID", env.mpi_localrankid, "MPI_LOCALNRANKS", env.mpi_localnranks, id.local_rank,
                       id.local_world_size);
  read_store_address(id, env, env.pmi_jobid.value_or("0"));
  return id;
}

/// PMIx provides the world size only through its library, so this reads it from a variable of Open MPI or SLURM.
Identity from_pmix(const Env& env) {
  Identity id{.source = "pmix"};
  const bool by_open_mpi = env.ompi_comm_world_size.has_value();
  if (!by_open_mpi && !env.slurm_ntasks)
    throw UsageError(
        "PMIX_RANK is " + base::quoted(env.pmix_rank.value_or(""), 80) +
            ", but no variable gives the number of ranks: neither OMPI_COMM_WORLD_SIZE nor SLURM_NTASKS is set",
        "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or pass them to init(); LOCKSTEP_ENV_FROM=none starts a "
        "world of size one");
  read_rank_and_size(id, "PMIX_RANK", env.pmix_rank, by_open_mpi ? "OMPI_COMM_WORLD_SIZE" : "SLURM_NTASKS",
                     by_open_mpi ? env.ompi_comm_world_size : env.slurm_ntasks);
  read_store_address(id, env, required("pmix", "PMIX_NAMESPACE", env.pmix_namespace));
  return id;
}

/// Reads the index and the number of the hosts of the step, and the index and the number of the tasks on this host.
void read_slurm_indices(Identity& id, const Env& env) {
  read_index_and_count("SLURM_NODEID", env.slurm_nodeid, "SLURM_STEP_NUM_NODES", env.slurm_step_num_nodes, id.node_rank,
                       id.num_nodes);
  Env::Value tasks_here;
  if (env.slurm_step_tasks_per_node && id.node_rank >= 0) {
    const std::vector<int> tasks = expand_counts("SLURM_STEP_TASKS_PER_NODE", *env.slurm_step_tasks_per_node);
    if (static_cast<std::size_t>(id.node_rank) >= tasks.size())
      throw UsageError("SLURM_NODEID is " + std::to_string(id.node_rank) + ", but SLURM_STEP_TASKS_PER_NODE is " +
                       base::quoted(*env.slurm_step_tasks_per_node, 80) + ", which describes " +
                       std::to_string(tasks.size()) + (tasks.size() == 1 ? " host" : " hosts"));
    tasks_here = std::to_string(tasks[static_cast<std::size_t>(id.node_rank)]);
  }
  read_index_and_count("SLURM_LOCALID", env.slurm_localid, "this host's entry in SLURM_STEP_TASKS_PER_NODE", tasks_here,
                       id.local_rank, id.local_world_size);
}

Identity from_slurm(const Env& env) {
  Identity id{.source = "slurm"};
  read_rank_and_size(id, "SLURM_PROCID", env.slurm_procid, "SLURM_NTASKS", env.slurm_ntasks);
  const std::int64_t job =
      base::parse_int_in_range("SLURM_JOB_ID", required("slurm", "SLURM_JOB_ID", env.slurm_job_id), 0, kMaxSlurmId);
  const std::int64_t step = base::parse_int_in_range(
      "SLURM_STEP_ID", required("slurm", "SLURM_STEP_ID", env.slurm_step_id), 0, kFirstSpecialStep - 1);
  read_slurm_indices(id, env);
  id.generation = parse_number("SLURM_RESTART_COUNT", env.slurm_restart_count.value_or("0"), 0, INT_MAX);
  read_store_address(id, env, "slurm-" + std::to_string(job) + "." + std::to_string(step));
  if (id.world_size == 1 || !id.address.host.empty()) return id;
  // All tasks derive the same address without communication. On one host, use an address that needs no name resolution.
  id.address.host = id.num_nodes == 1 ? "127.0.0.1"
                                      : expand_hosts("SLURM_STEP_NODELIST",
                                                     required("slurm", "SLURM_STEP_NODELIST", env.slurm_step_nodelist))
                                            .front();
  id.address.port = slurm_port(job, step);
  return id;
}

/// Returns whether srun started this process, according to its variables. SLURM_PROCID alone does not suffice: a batch
/// script and the shell of salloc have it as well.
bool is_slurm_step(const Env& env) {
  return env.slurm_procid && env.slurm_step_id && base::parse_int(*env.slurm_step_id).value_or(0) < kFirstSpecialStep;
}

/// One rank in each pod.
Identity from_pod(const Env& env) {
  const std::optional<Pod> pod = find_pod(env);
  if (!pod)
    throw UsageError("LOCKSTEP_ENV_FROM is pod, but no variable of a pod is set, such as PET_NODE_RANK and PET_NNODES");
  check_is_complete(*pod);
  check_one_rank_per_pod(*pod);
  Identity id{.source = "pod", .rank = pod->index, .world_size = pod->num_pods};
  if (id.world_size == 1) return id;
  id.store = StoreKind::kRankZero;
  id.address = first_address(*pod);
  return id;
}

Identity from_explicit(const ExplicitIdentity& given) {
  Identity id{.source = "explicit"};
  const auto text = [](const std::optional<int>& value) -> Env::Value {
    return value ? Env::Value(std::to_string(*value)) : std::nullopt;
  };
  read_rank_and_size(id, "InitOptions.rank", text(given.rank), "InitOptions.world_size", text(given.world_size));
  if (id.world_size == 1) return id;
  if (given.address.empty())
    throw UsageError("InitOptions.address is empty, but world_size is " + std::to_string(id.world_size) +
                     "; expected host:port of rank 0");
  id.store = StoreKind::kRankZero;
  id.address = base::net::parse_address("InitOptions.address", given.address);
  return id;
}

/// Returns the first source whose variables are set, in the order that identify() documents.
std::string_view detect_source(const Env& env) {
  const bool by_slurm = is_slurm_step(env);
  const bool by_pmi = env.pmi_rank || env.pmi_size;
  const bool by_open_mpi = env.ompi_comm_world_rank || (env.ompi_comm_world_size && !env.pmix_rank);
  // Users of these launchers may set LOCKSTEP_STORE alone.
  const bool is_ranked = by_open_mpi || by_slurm || by_pmi || env.pmix_rank;
  if (env.lockstep_rank || env.lockstep_world_size || (env.lockstep_store && !is_ranked)) return "lockstep";
  if (env.torchelastic_run_id) return "torchrun";
  if (env.rank || env.world_size) return "env://";
  if (by_open_mpi) return "mpi";
  // Hydra starts its daemons with srun, so the step's tasks are the daemons, not the ranks. With srun and a PMI plugin,
  // PMI and SLURM have the same rank numbers.
  if (by_slurm && !(by_pmi && env.mpi_localrankid)) return "slurm";
  if (by_pmi) return "pmi";
  if (env.pmix_rank) return "pmix";
  const std::optional<Pod> pod = find_pod(env);
  return pod && pod->num_pods != 1 ? "pod" : "none";
}

/// Returns the source that `name`, one of kRankSources, selects.
std::string_view parse_source(const std::string& name, const Env& env) {
  if (name == "auto") return detect_source(env);
  if (name == "pmi") return env.pmix_rank && !env.pmi_rank ? "pmix" : "pmi";
  for (const std::string_view source : base::kRankSources)
    if (name == source) return source;
  throw UsageError("InitOptions.env_from is " + base::quoted(name, 80) + "; expected " +
                   base::alternatives({base::kRankSources.begin(), base::kRankSources.end()}));
}

}  // namespace

std::uint16_t slurm_port(std::int64_t job, std::int64_t step) {
  return static_cast<std::uint16_t>(kFirstSlurmPort + (101 * job + step) % kNumSlurmPorts);
}

std::string_view identity_source(const Env& env) {
  env.check();
  const std::string from = env.lockstep_env_from.value_or("auto");
  const std::string_view source = parse_source(from, env);
  return from == "auto" && source == "none" ? "" : source;
}

Identity identify(const Env& env, const ExplicitIdentity& given) {
  if (given.rank || given.world_size || !given.address.empty()) return from_explicit(given);
  env.check();
  const std::string from = !given.env_from.empty() ? given.env_from : env.lockstep_env_from.value_or("auto");
  const std::string_view source = parse_source(from, env);
  if (source == "lockstep") {
    Identity id = from_lockstep(env);
    if (from == "auto") check_no_inner_torchrun(env, id);
    return id;
  }
  if (source == "torchrun" || source == "env://") {
    const std::optional<Pod> pod = find_pod(env);
    if (from == "auto" && pod) check_one_rank_per_pod(*pod);
    return from_torchrun(env, source == "torchrun" ? "torchrun" : "env://");
  }
  if (source == "mpi") return from_mpi(env);
  if (source == "slurm") return from_slurm(env);
  if (source == "pmi") return from_pmi(env);
  if (source == "pmix") return from_pmix(env);
  if (source == "pod") return from_pod(env);
  return {.source = "none"};
}

}  // namespace lockstep::job::identity
