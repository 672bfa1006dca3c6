#include "lockstep/comm/init.h"

#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <thread>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "lockstep/base/log.h"
#include "lockstep/base/process_owned.h"
#include "lockstep/base/simd/cpu_features.h"
#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/base/timeouts.h"
#include "lockstep/comm/arena/cpu_allocator.h"
#include "lockstep/comm/channel/host_watch.h"
#include "lockstep/comm/device_selection.h"
#include "lockstep/comm/group_access.h"
#include "lockstep/comm/uncaught_exception.h"
#include "lockstep/comm/world.h"
#include "lockstep/job/fatal.h"
#include "lockstep/job/join.h"
#include "lockstep/job/store_client.h"

namespace lockstep::comm {
namespace {

using base::Deadline;
using base::Env;
using job::identity::StoreKind;

constexpr auto kUnlimitedSetupTimeout = std::chrono::hours(24);
constexpr std::uint64_t kOwnFiles = 512;  // descriptors that a rank needs for anything but the store

/// The store needs at most five connections per rank. Usually fewer descriptors suffice, so a failure is only logged.
void raise_file_limit_for_store(int ranks) {
  try {
    base::raise_fd_limit(job::store_fd_count(ranks) + kOwnFiles);
  } catch (const base::SystemError& error) {
    base::log_warning(error.what());
  }
}

/// Returns whether the host name of rank 0 that SLURM set resolves to a loopback address on this host, as Debian does
/// for its own name (127.0.1.1). The other hosts then cannot connect to that address.
bool is_loopback_alias(const job::identity::Identity& id) {
  if (id.source != "slurm" || id.num_nodes <= 1) return false;
  const std::string here = base::net::source_address_for(id.address);
  return here != id.address.host && (here.starts_with("127.") || here == "::1");
}

/// Rank 0 serves the store; the other ranks connect to it. If the address is in use or belongs to another host, rank 0
/// connects as a client, and join() reports whether two processes have rank 0.
void open_rank_zero_store(World& world, const ExternalRendezvous* rendezvous, Deadline deadline) {
  const job::identity::Identity& id = world.identity;
  if (id.rank == 0) raise_file_limit_for_store(id.world_size);
  if (id.store == StoreKind::kTorchrun) return rendezvous_over_torchrun(world, deadline);
  if (rendezvous)
    rendezvous_over_caller(world, *rendezvous, deadline);
  else if (id.address.host.empty())
    rendezvous_over_mpi(world, deadline);
  const job::Credentials credentials{id.job, id.generation, world.key};
  if (id.rank == 0 && !world.key.is_set())
    base::log_warning("this job has no key: any process that can connect to " + to_string(id.address) +
                      " can join it. Set LOCKSTEP_KEY_FILE to a file with a key");
  if (id.rank == 0 && !world.server) {
    base::net::wait_for_name(id.address, deadline);
    try {
      const base::net::Address all_networks{"0.0.0.0", id.address.port};
      world.server = std::make_unique<job::StoreServer>(is_loopback_alias(id) ? all_networks : id.address, credentials,
                                                        id.world_size, true);
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

void open_store(World& world, const ExternalRendezvous* rendezvous, Deadline deadline) {
  const job::identity::Identity& id = world.identity;
  switch (id.store) {
    case StoreKind::kLocal: world.store = std::make_shared<job::LocalStore>(); break;
    case StoreKind::kLauncher:
      world.store = job::connect_store(id.address, {id.job, id.generation, world.key}, id.rank, deadline);
      break;
    case StoreKind::kRankZero:
    case StoreKind::kTorchrun: open_rank_zero_store(world, rendezvous, deadline); break;
  }
  if (id.store == StoreKind::kLocal) return;
  world.address = is_loopback_alias(id) ? base::net::address_of_interface(world.interface) : "";
  if (world.address.empty()) world.address = base::net::source_address_for(id.address);
}

/// Returns the key in the page that the agent made for this process, else the key in the file that the user named.
job::JobKey find_key() {
  const auto& file = Env::this_process().lockstep_key_file;
  job::JobKey given = job::JobKey::inherited();
  return given.is_set() || !file ? given : job::JobKey::from_file(*file);
}

std::vector<int> ranks_of_other_hosts(const job::identity::Identity& id) {
  std::vector<int> remote_ranks;
  for (int rank = 0; rank < id.world_size; ++rank)
    if (id.host_indices[static_cast<std::size_t>(rank)] != id.host_indices[static_cast<std::size_t>(id.rank)])
      remote_ranks.push_back(rank);
  return remote_ranks;
}

/// InitOptions with what the environment says where an option is not set, and else its default.
struct Settings {
  job::identity::Identity identity;
  std::chrono::milliseconds timeout;  // 0: no limit
  std::chrono::milliseconds join_timeout;
  std::string transport;
  CrossHostTransport cross_host_transport;
  DeviceRequest device;
  std::optional<bool> arena;  // unset: if other ranks of this host can map it
  std::string interface;
  job::Injection injection;
};

void log_world(const World& world, const std::string& reason) {
  const job::identity::Identity& id = world.identity;
  if (id.rank != 0 || id.source == "none") return;
  const int hosts = 1 + *std::max_element(id.host_indices.begin(), id.host_indices.end());
  base::log_info(
      std::to_string(id.world_size) + (id.world_size == 1 ? " rank" : " ranks") + " on " + std::to_string(hosts) +
      (hosts == 1 ? " host" : " hosts") + " (" + id.source + "); transport " + world.transport +
      (world.cross_host_transport == CrossHostTransport::kNone ? "" : " over " + name(world.cross_host_transport)) +
      " (" + reason + ")" +
      (world.gpu_transport_text.empty() ? "" : "; " + world.gpu.name + ", GPU tensors " + world.gpu_transport_text) +
      (world.address.empty() ? "" : ", address " + world.address));
}

void check_injection(const World& world) {
  if (world.injection.rank >= world.identity.world_size)
    throw base::UsageError("the fault to inject is for rank " + std::to_string(world.injection.rank) +
                           "; expected 0 to " + std::to_string(world.identity.world_size - 1));
}

/// Publishes an error in init() as the job's first cause, if the store is connected.
void publish_init_failure(const World& world, const base::Error& error) noexcept {
  // The loss of another rank is a consequence. The launcher publishes the cause, which is how that rank has ended.
  if (!world.store || error.cause() == base::Cause::kPeerUnreachable) return;
  job::publish_cause(*world.store, {.cause = error.cause(),
                                    .rank = world.identity.rank,
                                    .host = base::net::host_name(),
                                    .pid = ::getpid(),
                                    .op = "init",
                                    .detail = error.what(),
                                    .hint = error.hint()});
  // The store ends with this process; the other ranks need time to read from it.
  if (world.server) std::this_thread::sleep_for(base::kPeersReadTime);
}

std::shared_ptr<channel::DeadlockDetector> make_deadlock_detector(const World& world,
                                                                  std::chrono::milliseconds timeout) {
  const job::identity::Identity& id = world.identity;
  auto detector = std::make_shared<channel::DeadlockDetector>(world.store, id.rank, base::net::host_name(), timeout,
                                                              ranks_of_other_hosts(id));
  if (id.num_nodes > 1 && !world.address.empty())
    detector->watch_hosts(std::make_unique<channel::HostWatch>(world.store, id.rank, id.host_indices, world.address));
  return detector;
}

/// C buffers stdout in blocks if it is a pipe, such as the one to the launcher: a user would see no line for minutes,
/// and would lose the last lines of a rank that is killed.
void show_lines_at_once() {
  static char buffer[BUFSIZ];  // glibc only sets a flag without one, which puts() ignores if stdout was used before
  std::setvbuf(stdout, buffer, _IOLBF, sizeof buffer);
}

job::identity::Identity identity_of(const ExternalRendezvous& rendezvous) {
  job::identity::Identity id{.source = "c10d", .rank = rendezvous.rank, .world_size = rendezvous.world_size};
  if (id.world_size > 1) id.store = StoreKind::kRankZero;
  return id;
}

/// Throws UsageError for what this process can tell by itself.
Settings parse_settings(const InitOptions& options, const ExternalRendezvous* rendezvous, const Env& env) {
  const auto text = [](const std::string& option, const Env::Value& variable) {
    return !option.empty() ? option : variable.value_or("auto");
  };
  env.check();
  base::simd::best_instruction_set();  // one that this CPU lacks fails here, not in a step
  Settings settings{.identity = rendezvous ? identity_of(*rendezvous)
                                           : job::identity::identify(env, {options.rank, options.world_size,
                                                                           options.address, options.env_from}),
                    .timeout = options.timeout.value_or(env.lockstep_timeout.value_or(base::kDefaultTimeout)),
                    .join_timeout = {},
                    .transport = text(options.transport, env.lockstep_transport),
                    .cross_host_transport = CrossHostTransport::kNone,
                    .device = parse_device(text(options.device, env.lockstep_device)),
                    .arena = options.arena ? options.arena : env.lockstep_arena,
                    .interface = env.lockstep_interface.value_or(""),
                    .injection = {}};
  const std::string& source = settings.identity.source;
  settings.join_timeout = options.join_timeout.value_or(env.lockstep_join_timeout.value_or(
      source == "pod" || (source == "env://" && !env.local_rank) ? base::kDefaultPodJoinTimeout
                                                                 : base::kDefaultJoinTimeout));
  if (env.lockstep_inject) settings.injection = job::parse_injection("LOCKSTEP_INJECT", *env.lockstep_inject);
  settings.cross_host_transport = choose_cross_host_transport(
      settings.identity, text(options.cross_host_transport, env.lockstep_cross_host_transport));
  check_transport(settings.transport, settings.identity.world_size);
  if (env.lockstep_host_timeout) base::net::set_host_timeout(*env.lockstep_host_timeout);
  return settings;
}

/// Joins the job, chooses the transport, and sets up what groups need. The world can be used to report a failure.
void open_world(World& world, const Settings& settings, bool on_gpu, Deadline deadline) {
  job::join(*world.store, world.identity,
            {{"lockstep", LOCKSTEP_VERSION},
             {"libtorch", TORCH_VERSION},
             {"transport", settings.transport},
             {"outer", name(settings.cross_host_transport)},
             {"device", on_gpu ? "cuda" : "cpu"},
             {"libtorch_cpu", job::build_id("libtorch_cpu.so")},
             {"program", job::build_id("")}},
            deadline);
  check_injection(world);
  const TransportChoice choice = choose_transport(world.identity, settings.transport, settings.cross_host_transport);
  world.transport = choice.name;
  world.cross_host_transport = choice.cross_host;
  if (on_gpu) select_gpu(world, settings.device);
  prepare_transport(world, settings.transport, deadline);
  // Under `lockstep plan`, a single rank stands for one of several, each on a host of its own, which would have an
  // arena.
  const bool has_peers = world.transport == "shm" || world.transport == "hierarchy" || base::profile_request();
  if (settings.arena.value_or(has_peers)) arena::install_arena();
  log_world(world, choice.reason);
}

/// Makes this rank visible: to the ranks that wait for it, and to the agent.
void publish_world(World& world, std::chrono::milliseconds timeout) {
  auto& page = base::telemetry::RankPage::this_process();
  const job::identity::Identity& id = world.identity;
  const bool is_local = id.store == StoreKind::kLocal;
  world.deadlock_detector = make_deadlock_detector(world, timeout);
  base::telemetry::publish_to(
      page, {.rank = id.rank, .world_size = id.world_size, .job = id.job, .transport = world.transport});
  if (!is_local || page.agent_pid != 0)
    world.heartbeat = std::make_unique<job::health::Heartbeat>(is_local ? nullptr : world.store, id.rank);
  if (page.agent_pid != 0) show_lines_at_once();
}

std::shared_ptr<World> make_world(const InitOptions& options, const ExternalRendezvous* rendezvous) {
  const Settings settings = parse_settings(options, rendezvous, Env::this_process());
  auto world = base::make_process_owned<World>();
  world->identity = settings.identity;
  world->timeout = settings.timeout.count() > 0 ? settings.timeout : kUnlimitedSetupTimeout;
  world->interface = settings.interface;
  world->injection = settings.injection;
  const bool on_gpu = detect_gpus(*world, settings.device);
  if (world->identity.store != StoreKind::kLocal) world->key = find_key();
  const Deadline deadline = Deadline::in(settings.join_timeout);
  open_store(*world, rendezvous, deadline);
  try {
    open_world(*world, settings, on_gpu, deadline);
  } catch (const base::Error& error) {
    publish_init_failure(*world, error);
    throw;
  }
  publish_world(*world, settings.timeout);
  return world;
}

}  // namespace

Group init(const InitOptions& options) { return GroupAccess::init(options, nullptr); }
Group init(const InitOptions& options, const ExternalRendezvous& rendezvous) {
  return GroupAccess::init(options, &rendezvous);
}

Group GroupAccess::init(const InitOptions& options, const ExternalRendezvous* rendezvous) {
  // A process has one world, because its rank, its store and its local peers exist once. A second init() returns it.
  static std::mutex mutex;
  static std::weak_ptr<Group::Impl> current;
  static bool has_left_world = false;
  static InitOptions joined_with;
  const std::lock_guard lock(mutex);
  if (auto impl = current.lock()) {
    if (options != InitOptions() && options != joined_with)
      throw base::UsageError(
          "init: this process has already joined its job with other options; expected the same options, or none",
          "pass the options to the first init(), which may be the one inside a Trainer");
    return Group(std::move(impl));
  }
  if (has_left_world)
    throw base::UsageError("init: this process has left its world and cannot join it again",
                           "keep a copy of the group while it is needed");
  const auto made = make_world(options, rendezvous);
  Group world = [&] {
    try {
      return Group(made);
    } catch (const base::Error& error) {
      publish_init_failure(*made, error);
      throw;
    }
  }();
  current = world.impl_;
  joined_with = options;
  report_failures_to({made->deadlock_detector, made->server != nullptr});
  has_left_world = world.size() > 1;
  return world;
}

}  // namespace lockstep::comm
