#include "lockstep/comm/world.h"

#include <algorithm>
#include <climits>
#include <exception>
#include <iterator>
#include <map>
#include <thread>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/comm/cuda/device_transport.h"
#include "lockstep/comm/device_selection.h"
#include "lockstep/comm/gloo/gloo.h"
#include "lockstep/comm/hierarchy/hierarchy.h"
#include "lockstep/comm/mpi/mpi.h"
#include "lockstep/comm/nccl/nccl.h"
#include "lockstep/comm/self/self.h"
#include "lockstep/comm/shm/shm.h"
#include "lockstep/comm/torchrun_rendezvous.h"
#include "lockstep/comm/uncaught_exception.h"
#include "lockstep/job/fatal.h"
#include "lockstep/job/identity/pmi.h"
#include "lockstep/job/store_client.h"

namespace lockstep::comm {
namespace {

// Operations of gloo that are carried out at once; hierarchy has six pieces of a large one under way.
constexpr int kFewThreads = 2;
constexpr int kManyThreads = 4;
constexpr auto kConnectTime = std::chrono::seconds(2);  // and then asks whether there is another one
constexpr auto kRetryPause = std::chrono::milliseconds(100);
constexpr auto kLeavePollInterval = std::chrono::milliseconds(5);
constexpr auto kPeersReadTime = std::chrono::seconds(1);  // what ended the job: they look every 200 ms
// Small messages by MPI, which is quicker for them; the rest by gloo, which has threads of its own.
constexpr const char* kGlooAndMpi = "gloo and mpi";

}  // namespace

World::~World() {
  if (std::uncaught_exceptions() > 0) {
    base::RankPage::this_process().has_left.store(1);  // whoever watches need not wait for beats
    // Who catches it may have something to tell, and the others read it here.
    [[maybe_unused]] static const job::StoreServer* kept = nullptr;
    kept = server.release();
    return;
  }
  if (deadlock_detector) deadlock_detector->leave();
  stop_reporting_failures();
  if (server) wait_for_other_ranks();
}

/// The others need the store until they have left, as long as they get on.
void World::wait_for_other_ranks() noexcept {
  try {
    std::map<int, base::Deadline> there;  // and when one that has lost its connections has not come back
    for (int rank = 0; rank < identity.world_size; ++rank)
      if (rank != identity.rank) there.emplace(rank, base::Deadline::in(job::kReconnectGrace));
    job::Store& table = server->store();
    std::string before;
    base::Deadline limit = base::Deadline::in(timeout);
    bool failed = false;
    while (!there.empty() && !limit.expired()) {
      if (!failed && table.find(job::key::kCause, limit)) {
        failed = true;
        limit = earlier(limit, base::Deadline::in(kPeersReadTime));
      }
      std::vector<int> others;
      for (auto at = there.begin(); at != there.end();) {
        const int rank = at->first;
        if (table.find(job::key::exited(rank), limit) != job::key::kClosedWithoutCause)
          at->second = base::Deadline::in(job::kReconnectGrace);
        const bool gone = at->second.expired() || table.find(job::key::left(rank), limit);
        if (!gone) others.push_back(rank);
        at = gone ? there.erase(at) : std::next(at);
      }
      std::string progress = job::read_progress(table, others, limit);
      if (!failed && progress != before) limit = base::Deadline::in(timeout);
      before = std::move(progress);
      std::this_thread::sleep_for(kLeavePollInterval);
    }
  } catch (const std::exception&) {
    // Then they are on their own.
  }
}

namespace {

/// Rank 0's part of a meeting: it serves the store at `host`. Returns what the others need: the key, unless they have
/// one, and the address.
std::string start_store_server(World& world, const std::string& host) {
  if (host.empty())
    throw base::UsageError(
        "no network interface of this host has an address for the others" +
            (world.interface.empty() ? std::string() : "; LOCKSTEP_INTERFACE is " + base::quoted(world.interface, 80)),
        "ip addr lists the interfaces");
  const job::JobKey random = job::JobKey::random();
  const job::JobKey& key = world.key.is_set() ? world.key : random;
  world.server = std::make_unique<job::StoreServer>(
      base::Address{host, 0}, job::Credentials{world.identity.job, world.identity.generation, key}, true);
  return std::string(random.bytes()) + std::to_string(world.identity.generation) + " " +
         base::to_string(world.server->address());
}

void apply_rendezvous_message(World& world, const std::string& received) {
  const auto parts =
      base::split(std::string_view(received).substr(std::min(received.size(), job::JobKey::kBytes)), ' ');
  if (parts.size() != 2)
    throw base::CommError(base::Cause::kProtocol, "init", -1, 0,
                          "what rank 0 says of where the ranks meet cannot be read");
  if (!world.key.is_set()) world.key = job::JobKey(std::string_view(received).substr(0, job::JobKey::kBytes));
  world.identity.generation = static_cast<int>(base::parse_int_in_range("rank 0's generation", parts[0], 0, INT_MAX));
  world.identity.address = base::parse_address("rank 0's address", parts[1]);
}

/// On one host nobody else need reach it. Else where the others find torchrun's store, which is on rank 0's host as a
/// rule, unless the name of that host means the host alone, as Debian's does.
std::string address_under_torchrun(const World& world) {
  if (world.identity.local_world_size == world.identity.world_size) return "127.0.0.1";
  const std::string towards = base::source_address_for(world.identity.address);
  if (world.interface.empty() && !towards.starts_with("127.") && towards != "::1") return towards;
  const std::string found = base::address_of_interface(world.interface);
  return found.empty() && world.interface.empty() ? towards : found;
}

}  // namespace

void rendezvous_over_mpi(World& world, base::Deadline deadline) {
  const job::Identity& id = world.identity;
  const auto message = [&](bool one_host) {
    return id.rank == 0
               ? start_store_server(world, one_host ? "127.0.0.1" : base::address_of_interface(world.interface))
               : "";
  };
  const std::string missing = mpi_unavailable_reason();
  if (missing.empty()) {
    init_mpi(id.rank, id.world_size);
    return apply_rendezvous_message(world, broadcast_over_mpi(message(is_mpi_world_on_one_host()), deadline));
  }
  const auto& fd = base::Env::this_process().pmi_fd;
  if (id.source != "pmi" || !fd)
    throw base::UsageError("the contract " + id.source + " does not say where the ranks meet: " + missing,
                           "LOCKSTEP_STORE=HOST:PORT, with the host of rank 0 and a port that is free there, or "
                           "MASTER_ADDR and MASTER_PORT");
  const auto number = static_cast<int>(base::parse_int_in_range("PMI_FD", *fd, 0, INT_MAX));
  apply_rendezvous_message(
      world, job::pmi_broadcast(number, id.rank, message(id.local_world_size == id.world_size), deadline));
}

void rendezvous_over_torchrun(World& world, base::Deadline deadline) {
  job::Identity& id = world.identity;
  const base::Address torchrun = id.address;
  const std::string key = "lockstep/" + id.job;
  const auto connect = [&](base::Deadline limit) {
    return job::connect_store(id.address, {id.job, id.generation, world.key}, id.rank, limit);
  };
  if (id.rank == 0) {
    apply_rendezvous_message(
        world, exchange_over_torchrun_store(torchrun, key, start_store_server(world, address_under_torchrun(world)),
                                            deadline));
    world.store = connect(deadline);
    return;
  }
  // torchrun's store outlives restarts, and its hosts do not count them alike: the word may be that of a rank 0 that is
  // no more.
  for (const job::JobKey given = world.key;; world.key = given) {
    apply_rendezvous_message(world, exchange_over_torchrun_store(torchrun, key, "", deadline));
    try {
      world.store = connect(earlier(deadline, base::Deadline::in(kConnectTime)));
      return;
    } catch (const base::CommError&) {
      if (deadline.expired()) throw;
    }
    std::this_thread::sleep_for(kRetryPause);
  }
}

const std::vector<std::string>& transport_names() {
  static const std::vector<std::string> names = {"auto", "self", "shm", "hierarchy", "gloo", "mpi", "nccl"};
  return names;
}

void check_transport(const std::string& asked, int size) {
  const auto& names = transport_names();
  if (std::find(names.begin(), names.end(), asked) == names.end()) {
    std::string list;
    for (const std::string& one : names) list += (list.empty() ? "" : ", ") + one;
    throw base::UsageError("transport is " + base::quoted(asked, 80) + "; allowed are " + list);
  }
  if (asked == "self" && size > 1)
    throw base::UsageError("transport self is for a world of one, but there are " + std::to_string(size) +
                           " ranks; allowed here are auto, shm, hierarchy, gloo, mpi and nccl");
  if (asked == "gloo" && !gloo_unavailable_reason().empty())
    throw base::UsageError("transport gloo: " + gloo_unavailable_reason());
  if (asked == "mpi" && !mpi_unavailable_reason().empty())
    throw base::UsageError("transport mpi: " + mpi_unavailable_reason());
  if (asked == "mpi") check_mpi_library();
}

std::string choose_cross_host_transport(const job::Identity& identity, const std::string& asked) {
  if (asked != "auto" && asked != "gloo" && asked != "mpi")
    throw base::UsageError("the transport between hosts (LOCKSTEP_OUTER) is " + base::quoted(asked, 80) +
                           "; allowed are auto, gloo and mpi");
  if (asked == "mpi" && !mpi_unavailable_reason().empty())
    throw base::UsageError("the transport between hosts: mpi: " + mpi_unavailable_reason());
  if (asked == "gloo" && !gloo_unavailable_reason().empty())
    throw base::UsageError("the transport between hosts: gloo: " + gloo_unavailable_reason());
  const std::string& source = identity.source;
  const bool mpi = mpi_unavailable_reason().empty() &&
                   (asked == "mpi" || (asked == "auto" && (source == "mpi" || source == "pmi" || source == "pmix")));
  if (mpi) check_mpi_library();
  if (asked != "auto") return asked;
  if (gloo_unavailable_reason().empty()) return mpi ? kGlooAndMpi : "gloo";
  return mpi ? "mpi" : "none";
}

std::string choose_transport(World& world, const std::string& asked, const std::string& outer) {
  const int size = world.identity.world_size;
  const bool one_host = static_cast<int>(world.identity.local_ranks.size()) == size;
  if (asked == "shm" && !one_host)
    throw base::UsageError("transport shm is for ranks of one host, but there are " +
                           std::to_string(world.identity.num_nodes) +
                           " hosts; allowed here are auto, hierarchy, gloo and mpi");
  if (asked == "hierarchy" && one_host)
    throw base::UsageError("transport hierarchy is for ranks of several hosts, but all " + std::to_string(size) +
                           " share one; allowed here are auto, shm, gloo and mpi");
  world.transport = asked;
  const bool free = asked == "auto" || asked == "nccl";  // which is for tensors on GPUs alone
  if (free) world.transport = size == 1 ? "self" : one_host ? "shm" : "hierarchy";
  if (world.transport == "hierarchy") {
    if (outer == "none")
      throw base::UsageError("no transport between hosts: gloo: " + gloo_unavailable_reason() +
                             "; mpi: " + mpi_unavailable_reason());
    world.outer = outer;
  }
  if (!free) return "asked for by name";
  return size == 1 ? "a world of one" : one_host ? "all ranks share a host" : "ranks of several hosts";
}

void prepare_transport(World& world, const std::string& asked, base::Deadline deadline) {
  const bool mpi = world.transport == "mpi" || world.outer.find("mpi") != std::string::npos;
  if (mpi && world.identity.world_size > 1) init_mpi(world.identity.rank, world.identity.world_size);
  if (world.transport == "shm" || world.transport == "hierarchy")
    world.neighbours = LocalPeers::meet(*world.store, world.identity.local_ranks, world.identity.rank, deadline);
  if (asked == "nccl" && world.device.is_cpu())
    throw base::UsageError("transport nccl: " + world.gpu_unavailable_reason);
  if (world.device.is_cpu() || world.identity.world_size == 1) return;
  const std::string missing = nccl_unavailable_reason();
  negotiate_gpu_transport(world, asked, missing.empty() ? nccl_version() : "", missing, deadline);
}

std::shared_ptr<Transport> World::make_gloo(const std::string& name, const std::vector<int>& members,
                                            int threads) const {
  return make_gloo_transport({.store = std::make_shared<job::PrefixStore>("gloo/" + name, store),
                              .rank = rank_in(members),
                              .size = static_cast<int>(members.size()),
                              .address = address,
                              .interface = interface,
                              .timeout = timeout,
                              .threads = threads});
}

std::shared_ptr<Transport> World::make_mpi(const std::string& name, const std::vector<int>& members) const {
  return make_mpi_transport({.store = std::make_shared<job::PrefixStore>("mpi/" + name, store),
                             .members = members,
                             .rank = rank_in(members),
                             .deadline = base::Deadline::in(timeout)});
}

std::shared_ptr<Transport> World::make_cross_host(Scope scope, const std::string& name,
                                                  const std::vector<int>& members) const {
  if (outer == "mpi" || (outer == kGlooAndMpi && scope == Scope::kSmall)) return make_mpi(name, members);
  return make_gloo(name, members, scope == Scope::kLarge ? kManyThreads : kFewThreads);
}

int World::rank_in(const std::vector<int>& members) const {
  return static_cast<int>(std::find(members.begin(), members.end(), identity.rank) - members.begin());
}

std::shared_ptr<Transport> World::make_transport(const std::string& name, const std::vector<int>& members,
                                                 const SplitParent& split_parent) const {
  const std::shared_ptr<Transport> parent = split_parent.from ? nccl_transport_of(*split_parent.from) : nullptr;
  if (transport == "self" || members.size() == 1) {
    if (parent) skip_nccl_split(*parent);
    return make_self_transport();
  }
  const auto on_host = make_host_transport(name, members);
  if (device.is_cpu()) return on_host;
  const int group_rank = rank_in(members);
  const auto host_of = [&](int member) { return identity.host_indices[static_cast<std::size_t>(member)]; };
  const bool several = std::any_of(members.begin(), members.end(),
                                   [&](int member) { return host_of(member) != host_of(members.front()); });
  DeviceTransportOptions options{
      .host = on_host, .rank = group_rank, .size = static_cast<int>(members.size()), .spans_hosts = several};
  if (!uses_nccl) return make_device_transport(std::move(options));
  const NcclOptions all{.store = store,
                        .members = members,
                        .rank = group_rank,
                        .gpu = gpu,
                        .host = base::host_name(),
                        .address = address};
  options.make_nccl = [name, all](const std::string& part, const std::vector<int>& ranks) {
    NcclOptions some = all;
    some.store = std::make_shared<job::PrefixStore>("nccl/" + name + part, all.store);
    some.members.clear();
    for (const int rank : ranks) some.members.push_back(all.members[static_cast<std::size_t>(rank)]);
    some.rank = static_cast<int>(std::find(ranks.begin(), ranks.end(), all.rank) - ranks.begin());
    return make_nccl_transport(std::move(some));
  };
  if (parent) {
    NcclOptions child = all;
    child.store = std::make_shared<job::PrefixStore>("nccl/" + name, store);
    child.parent = parent;
    child.color = split_parent.color;
    options.nccl = make_nccl_transport(std::move(child));
  }
  return make_device_transport(std::move(options));
}

std::shared_ptr<Transport> World::make_host_transport(const std::string& name, const std::vector<int>& members) const {
  const int group_rank = rank_in(members);
  std::vector<int> host_indices;
  for (const int member : members) hosts.push_back(identity.host_indices[static_cast<std::size_t>(member)]);
  const bool one_host = std::all_of(hosts.begin(), hosts.end(), [&](int host) { return host == hosts.front(); });
  if (transport == "shm" || (transport == "hierarchy" && one_host))
    return make_shm_transport({.neighbours = neighbours,
                               .store = std::make_shared<job::PrefixStore>("shm/" + name, store),
                               .members = members,
                               .rank = group_rank,
                               .timeout = timeout});
  if (transport == "hierarchy")
    return make_hierarchy_transport(
        {.neighbours = neighbours,
         .store = std::make_shared<job::PrefixStore>("hierarchy/" + name, store),
         .members = members,
         .hosts = hosts,
         .rank = group_rank,
         .timeout = timeout,
         .make_cross_host = [this, &name](Scope scope, const std::string& part, const std::vector<int>& ranks) {
           return make_cross_host(scope, name + "/" + part, ranks);
         }});
  if (transport == "mpi") return make_mpi(name, members);
  return make_gloo(name, members, kFewThreads);
}

}  // namespace lockstep::comm
