#include "lockstep/comm/init.h"

#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <thread>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "lockstep/base/log.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/comm/arena/cpu_allocator.h"
#include "lockstep/comm/device_selection.h"
#include "lockstep/comm/uncaught_exception.h"
#include "lockstep/comm/world.h"
#include "lockstep/job/fatal.h"
#include "lockstep/job/join.h"
#include "lockstep/job/store_client.h"

namespace lockstep::comm {
namespace {

using base::Deadline;
using base::Env;
using job::StoreKind;

constexpr auto kUnlimitedSetupTimeout = std::chrono::hours(24);
constexpr auto kPeersReadTime = std::chrono::seconds(1);  // they look every 200 ms
constexpr std::uint64_t kOwnFiles = 512;                  // of a rank that serves the store

/// Up to five connections a rank are the most; fewer descriptors do as a rule.
void raise_file_limit_for_store(int ranks) {
  try {
    base::raise_fd_limit(job::store_fd_count(ranks) + kOwnFiles);
  } catch (const base::SystemError& error) {
    base::log_warning(error.what());
  }
}

/// Whether the name of rank 0's host, which SLURM told, means the host alone here, as a Debian host knows its own name
/// (127.0.1.1): the others come from outside.
bool is_loopback_alias(const job::Identity& id) {
  if (id.source != "slurm" || id.num_nodes <= 1) return false;
  const std::string here = base::source_address_for(id.address);
  return here != id.address.host && (here.starts_with("127.") || here == "::1");
}

/// Rank 0 serves the store; so does nobody else. A rank 0 that finds the address taken, or not its own, goes on as a
/// client: join() then tells whether two processes think that they are rank 0.
void open_rank_zero_store(World& world, Deadline deadline) {
  const job::Identity& id = world.identity;
  if (id.rank == 0) raise_file_limit_for_store(id.world_size);
  if (id.store == StoreKind::kTorchrun) return rendezvous_over_torchrun(world, deadline);
  if (id.address.host.empty()) rendezvous_over_mpi(world, deadline);
  const job::Credentials credentials{id.job, id.generation, world.key};
  if (id.rank == 0 && !world.key.is_set())
    base::log_warning("this job has no key: whoever reaches " + to_string(id.address) +
                      " can join it; LOCKSTEP_KEY_FILE names a file with one");
  if (id.rank == 0 && !world.server) {
    try {
      const base::Address all_networks{"0.0.0.0", id.address.port};
      world.server =
          std::make_unique<job::StoreServer>(is_loopback_alias(id) ? all_networks : id.address, credentials, true);
    } catch (const base::SystemError& error) {
      try {
        world.store = job::connect_store(id.address, credentials, id.rank,
                                         earlier(deadline, Deadline::in(std::chrono::seconds(2))));
      } catch (const base::CommError&) {
        throw error;
      }
      return;
    }
  }
  world.store = job::connect_store(id.address, credentials, id.rank, deadline);
}

void open_store(World& world, Deadline deadline) {
  const job::Identity& id = world.identity;
  switch (id.store) {
    case StoreKind::kLocal: world.store = std::make_shared<job::LocalStore>(); break;
    case StoreKind::kLauncher:
      world.store = job::connect_store(id.address, {id.job, id.generation, world.key}, id.rank, deadline);
      break;
    case StoreKind::kRankZero:
    case StoreKind::kTorchrun: open_rank_zero_store(world, deadline); break;
  }
  if (id.store == StoreKind::kLocal) return;
  world.address = is_loopback_alias(id) ? base::address_of_interface(world.interface) : "";
  if (world.address.empty()) world.address = base::source_address_for(id.address);
}

/// That of the page that an agent made for this process, else of a file that the user named.
job::JobKey find_key(const Env& env) {
  job::JobKey given = job::JobKey::inherited();
  return given.is_set() || !env.lockstep_key_file ? given : job::JobKey::from_file(*env.lockstep_key_file);
}

std::vector<int> ranks_of_other_hosts(const job::Identity& id) {
  std::vector<int> remote_ranks;
  for (int rank = 0; rank < id.world_size; ++rank)
    if (id.host_indices[static_cast<std::size_t>(rank)] != id.host_indices[static_cast<std::size_t>(id.rank)])
      remote_ranks.push_back(rank);
  return remote_ranks;
}

/// What the program says, else the variable, else `otherwise`.
std::chrono::milliseconds limit(const std::optional<std::chrono::milliseconds>& option, const char* variable,
                                const Env::Value& value, std::chrono::milliseconds otherwise,
                                bool may_be_none = false) {
  if (option) return *option;
  if (!value) return otherwise;
  const auto seconds = base::parse_double(*value);
  if (!seconds || *seconds < 0 || (*seconds == 0 && !may_be_none) || *seconds > 1e7)
    throw base::UsageError(std::string(variable) + " is " + base::quoted(*value, 80) + "; allowed are seconds, " +
                           (may_be_none ? "0 for no limit, and at most 10000000" : "more than 0 and at most 10000000"));
  return std::chrono::milliseconds(static_cast<std::int64_t>(*seconds * 1000));
}

/// On when there are neighbours to read what lies in it, unless somebody says otherwise.
bool should_use_arena(const InitOptions& options, const Env& env, const World& world) {
  if (options.arena) return *options.arena;
  if (!env.lockstep_arena) return world.transport == "shm" || world.transport == "hierarchy";
  if (*env.lockstep_arena == "on") return true;
  if (*env.lockstep_arena == "off") return false;
  throw base::UsageError("LOCKSTEP_ARENA is " + base::quoted(*env.lockstep_arena, 80) + "; allowed are on and off");
}

void log_world(const World& world, const std::string& reason) {
  const job::Identity& id = world.identity;
  if (id.rank != 0 || id.source == "none") return;
  const int hosts = 1 + *std::max_element(id.host_indices.begin(), id.host_indices.end());
  base::log_info(
      std::to_string(id.world_size) + (id.world_size == 1 ? " rank" : " ranks") + " on " + std::to_string(hosts) +
      (hosts == 1 ? " host" : " hosts") + " (" + id.source + "); transport " + world.transport +
      (world.outer.empty() ? "" : " over " + world.outer) + " (" + reason + ")" +
      (world.gpu_transport_text.empty() ? "" : "; " + world.gpu.name + ", tensors there " + world.gpu_transport_text) +
      (world.address.empty() ? "" : ", address " + world.address));
}

void check_injection(const World& world) {
  if (world.injection.rank >= world.identity.world_size)
    throw base::UsageError("the fault to inject is for rank " + std::to_string(world.injection.rank) +
                           "; allowed are 0 to " + std::to_string(world.identity.world_size - 1));
}

/// An error while joining is the job's first cause, if the store can still be told.
void publish_init_failure(const World& world, const base::Error& error) noexcept {
  if (!world.store) return;
  job::publish_cause(*world.store, {.cause = error.cause(),
                                    .rank = world.identity.rank,
                                    .host = base::host_name(),
                                    .pid = ::getpid(),
                                    .op = "init",
                                    .detail = error.what(),
                                    .hint = error.hint()});
  // The others read it in the store that ends with this process.
  if (world.server) std::this_thread::sleep_for(kPeersReadTime);
}

std::shared_ptr<World> make_world(const InitOptions& options) {
  const Env& env = Env::this_process();
  auto world = std::make_shared<World>();
  world->identity = job::identify(env, {options.rank, options.world_size, options.address, options.env_from});
  const auto timeout =
      limit(options.timeout, "LOCKSTEP_TIMEOUT", env.lockstep_timeout, std::chrono::seconds(300), true);
  world->timeout = timeout.count() > 0 ? timeout : kUnlimitedSetupTimeout;
  const auto join_timeout =
      limit(options.join_timeout, "LOCKSTEP_JOIN_TIMEOUT", env.lockstep_join_timeout, std::chrono::seconds(60));
  world->interface = env.lockstep_interface.value_or("");
  if (env.lockstep_inject) world->injection = job::parse_injection("LOCKSTEP_INJECT", *env.lockstep_inject);
  const std::string asked = !options.transport.empty() ? options.transport : env.lockstep_transport.value_or("auto");
  const std::string outer = choose_cross_host_transport(
      world->identity, !options.outer.empty() ? options.outer : env.lockstep_cross_host_transport.value_or("auto"));
  check_transport(asked, world->identity.world_size);
  const DeviceRequest request =
      parse_device(!options.device.empty() ? options.device : env.lockstep_device.value_or("auto"));
  const bool on_gpu = detect_gpus(*world, request);
  if (world->identity.store != StoreKind::kLocal) world->key = find_key(env);
  const Deadline deadline = Deadline::in(join_timeout);
  open_store(*world, deadline);
  std::string reason;
  try {
    job::join(*world->store, world->identity,
              {{"lockstep", LOCKSTEP_VERSION},
               {"libtorch", TORCH_VERSION},
               {"transport", asked},
               {"outer", outer},
               {"device", on_gpu ? "cuda" : "cpu"},
               {"libtorch_cpu", job::build_id("libtorch_cpu.so")},
               {"program", job::build_id("")}},
              deadline);
    check_injection(*world);
    reason = choose_transport(*world, asked, outer);
    if (on_gpu) select_gpu(*world, request);
    prepare_transport(*world, asked, deadline);
    if (should_use_arena(options, env, *world)) install_arena();
  } catch (const base::Error& error) {
    publish_init_failure(*world, error);
    throw;
  }
  const job::Identity& id = world->identity;
  world->deadlock_detector =
      std::make_shared<DeadlockDetector>(world->store, id.rank, base::host_name(), timeout, ranks_of_other_hosts(id));
  base::publish_rank_page(id.rank, id.world_size, id.job, world->transport);
  if (id.store != StoreKind::kLocal || base::RankPage::this_process().agent_pid != 0)
    world->heartbeat =
        std::make_unique<job::Heartbeat>(id.store == StoreKind::kLocal ? nullptr : world->store, id.rank);
  log_world(*world, reason);
  return world;
}

}  // namespace

Group init(const InitOptions& options) {
  // The one world of this process: its rank number, store and neighbours exist once, so a second init() is the same
  // one.
  static std::mutex mutex;
  static std::weak_ptr<Group::Impl> current;
  static bool has_left_world = false;
  const std::lock_guard lock(mutex);
  if (auto impl = current.lock()) return Group(std::move(impl));
  if (has_left_world)
    throw base::UsageError("init: this process has left its world, and the others know",
                           "keep a copy of the group while it is needed");
  const auto made = make_world(options);
  Group world = [&] {
    try {
      return Group(made);
    } catch (const base::Error& error) {
      publish_init_failure(*made, error);
      throw;
    }
  }();
  current = world.impl_;
  report_failures_to({made->deadlock_detector, made->server != nullptr});
  has_left_world = world.size() > 1;
  return world;
}

}  // namespace lockstep::comm
