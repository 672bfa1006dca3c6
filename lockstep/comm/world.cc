#include "lockstep/comm/world.h"

#include <algorithm>
#include <climits>
#include <exception>
#include <future>
#include <iterator>
#include <map>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/base/thread.h"
#include "lockstep/base/timeouts.h"
#include "lockstep/comm/arena/arena.h"
#include "lockstep/comm/device_selection.h"
#include "lockstep/comm/gpu/device_transport.h"
#include "lockstep/comm/hierarchy/hierarchy.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/mpi/mpi.h"
#include "lockstep/comm/nccl/nccl.h"
#include "lockstep/comm/self/self.h"
#include "lockstep/comm/shm/shm.h"
#include "lockstep/comm/tcp/tcp.h"
#include "lockstep/comm/uncaught_exception.h"
#include "lockstep/job/exit_record.h"
#include "lockstep/job/fatal.h"
#include "lockstep/job/identity/pmi.h"
#include "lockstep/job/store_client.h"

namespace lockstep::comm {
namespace {

constexpr auto kConnectTime = std::chrono::seconds(2);  // then checks for a new address
constexpr auto kRetryPause = std::chrono::milliseconds(100);
constexpr auto kTorchrunPollInterval = std::chrono::milliseconds(20);
constexpr auto kLeavePollInterval = std::chrono::milliseconds(5);

template <typename Names>
void check_name(const char* what, const std::string& asked, const Names& names) {
  if (std::find(names.begin(), names.end(), asked) == names.end())
    throw base::UsageError(std::string(what) + " is " + base::quoted(asked, 80) + "; expected " +
                           base::alternatives({names.begin(), names.end()}));
}

/// Starts rank 0's store at `host`. Returns the rendezvous message for the other ranks: a key, which they use unless
/// they have one, the generation and the address.
std::string start_store_server(World& world, const std::string& host) {
  if (host.empty())
    throw base::UsageError(
        "init: no network interface of this host has an address that other hosts can reach" +
            (world.interface.empty() ? std::string() : "; LOCKSTEP_INTERFACE is " + base::quoted(world.interface, 80)),
        "set LOCKSTEP_INTERFACE to an interface that ip addr lists");
  const job::JobKey random = job::JobKey::random();
  const job::JobKey& key = world.key.is_set() ? world.key : random;
  world.server = std::make_unique<job::StoreServer>(
      base::net::Address{host, 0}, job::Credentials{world.identity.job, world.identity.generation, key},
      world.identity.world_size, true);
  return std::string(random.bytes()) + std::to_string(world.identity.generation) + " " +
         base::net::to_string(world.server->address());
}

void apply_rendezvous_message(World& world, const std::string& received) {
  const auto parts =
      base::split(std::string_view(received).substr(std::min(received.size(), job::JobKey::kBytes)), ' ');
  if (parts.size() != 2)
    throw base::CommError(base::Cause::kProtocol, "init", -1, 0, "the rendezvous message of rank 0 cannot be parsed");
  if (!world.key.is_set()) world.key = job::JobKey(std::string_view(received).substr(0, job::JobKey::kBytes));
  world.identity.generation = static_cast<int>(base::parse_int_in_range("rank 0's generation", parts[0], 0, INT_MAX));
  world.identity.address = base::net::parse_address("rank 0's address", parts[1]);
}

bool is_loopback(std::string_view host) { return host == "localhost" || host == "::1" || host.starts_with("127."); }

/// Returns the address at which other hosts reach this one: LOCKSTEP_INTERFACE's, or else the one from which this host
/// connects to `towards`, which is usually itself; but its name may resolve to a loopback address, as Debian's does.
/// Without `towards`, that of the first interface.
std::string address_of_this_host(const World& world, const base::net::Address& towards) {
  const std::string here = towards.host.empty() ? "127.0.0.1" : base::net::source_address_for(towards);
  if (world.interface.empty() && !is_loopback(here)) return here;
  const std::string found = base::net::address_of_interface(world.interface);
  return found.empty() && world.interface.empty() ? here : found;
}

std::string address_under_torchrun(const World& world) {
  const bool is_one_host = world.identity.local_world_size == world.identity.world_size;
  return is_one_host ? "127.0.0.1" : address_of_this_host(world, world.identity.address);
}

/// Returns "" if rank 0 has stored no message before the deadline.
std::string set_or_get(const base::net::Address& address, const std::string& key, const std::string& message,
                       base::Deadline deadline) {
  c10d::TCPStoreOptions options;
  options.port = address.port;
  options.isServer = false;
  options.waitWorkers = false;
  options.timeout = deadline.remaining();
  const auto tcp_store = c10::make_intrusive<c10d::TCPStore>(address.host, options);
  c10d::Store& store = *tcp_store;  // TCPStore hides the overloads for strings
  if (!message.empty()) {
    store.set(key, message);
    return message;
  }
  // c10d's own wait prints stack traces when it times out, so poll instead.
  while (!store.check({key})) {
    if (deadline.expired()) return "";
    std::this_thread::sleep_for(std::min<std::chrono::milliseconds>(kTorchrunPollInterval, deadline.remaining()));
  }
  return store.get_to_str(key);
}

base::CommError unpublished_address() {
  return {base::Cause::kJoinTimeout,
          "init",
          -1,
          0,
          "rank 0 did not publish the address of its store in time",
          "check that rank 0 calls lockstep::init()"};
}

/// Rank 0 stores `message` under `key` in the c10d TCPStore that torchrun serves at `address`; all other ranks pass ""
/// and read it. Every rank returns the message. Returns or throws at most one second after the deadline, even if c10d
/// itself blocks. Throws CommError kCoordinatorLost if the store does not answer, kJoinTimeout if rank 0 has stored no
/// message.
std::string exchange_over_torchrun_store(const base::net::Address& address, const std::string& key,
                                         const std::string& message, base::Deadline deadline) {
  const auto failed = [&](const std::string& why) {
    return base::CommError(base::Cause::kCoordinatorLost, "init", -1, -1,
                           "torchrun's store at " + to_string(address) + " " + why);
  };
  // If the store's process is stopped, c10d blocks in recv() without a limit. Its thread is then abandoned.
  auto promise = std::make_shared<std::promise<std::string>>();
  std::future<std::string> answer = promise->get_future();
  base::start_thread([=] {
    try {
      promise->set_value(set_or_get(address, key, message, deadline));
    } catch (...) {
      promise->set_exception(std::current_exception());
    }
  }).detach();
  if (answer.wait_until(deadline.when() + std::chrono::seconds(1)) != std::future_status::ready)
    throw failed("does not answer");
  try {
    std::string received = answer.get();
    if (!received.empty()) return received;
  } catch (const std::exception& error) {
    const std::string text = error.what();
    throw failed("failed: " + text.substr(0, text.find('\n')));
  }
  throw unpublished_address();
}

}  // namespace

World::~World() {
  if (std::uncaught_exceptions() > 0) {
    base::telemetry::RankPage::this_process().has_left.store(1);  // monitors must not expect further heartbeats
    // The code that catches the exception may still publish it, and the other ranks read it in this store.
    [[maybe_unused]] static const job::StoreServer* kept = nullptr;
    kept = server.release();
    return;
  }
  if (deadlock_detector) deadlock_detector->leave();
  stop_reporting_failures();
  if (server) wait_for_other_ranks();
}

/// Serves the store until all other ranks have left, as long as they make progress.
void World::wait_for_other_ranks() noexcept {
  try {
    std::map<int, base::Deadline> present;  // until when a rank that has lost its connections may reconnect
    for (int rank = 0; rank < identity.world_size; ++rank)
      if (rank != identity.rank) present.emplace(rank, base::Deadline::in(base::kReconnectGrace));
    job::Store& table = server->store();
    std::string before;
    base::Deadline limit = base::Deadline::in(timeout);
    bool failed = false;
    while (!present.empty() && !limit.expired()) {
      if (!failed && table.find(job::key::kCause, limit)) {
        failed = true;
        limit = earlier(limit, base::Deadline::in(base::kPeersReadTime));
      }
      std::vector<int> others;
      for (auto at = present.begin(); at != present.end();) {
        const int rank = at->first;
        const auto exit = job::find_exit(table, rank, limit);
        if (!exit || exit->kind != job::ExitKind::kClosed) at->second = base::Deadline::in(base::kReconnectGrace);
        const bool gone = at->second.expired() || table.find(job::key::left(rank), limit);
        if (!gone) others.push_back(rank);
        at = gone ? present.erase(at) : std::next(at);
      }
      std::string progress = job::health::read_progress(table, others, limit);
      if (!failed && progress != before) limit = base::Deadline::in(timeout);
      before = std::move(progress);
      std::this_thread::sleep_for(kLeavePollInterval);
    }
  } catch (const std::exception&) {
    // The store has failed; the other ranks detect that themselves.
  }
}

void rendezvous_over_mpi(World& world, base::Deadline deadline) {
  const job::identity::Identity& id = world.identity;
  const auto message = [&](bool one_host) {
    return id.rank == 0
               ? start_store_server(world, one_host ? "127.0.0.1" : base::net::address_of_interface(world.interface))
               : "";
  };
  const std::string missing = mpi::mpi_unavailable_reason();
  if (missing.empty()) {
    mpi::init_mpi(id.rank, id.world_size);
    return apply_rendezvous_message(world, mpi::broadcast_over_mpi(message(mpi::is_mpi_world_on_one_host()), deadline));
  }
  const auto& fd = base::Env::this_process().pmi_fd;
  if (id.source != "pmi" || !fd)
    throw base::UsageError("init: the launcher (" + id.source + ") sets no address for the rendezvous: " + missing,
                           "set LOCKSTEP_STORE=HOST:PORT, with the host of rank 0 and a port that is free there, or "
                           "MASTER_ADDR and MASTER_PORT");
  const auto number = static_cast<int>(base::parse_int_in_range("PMI_FD", *fd, 0, INT_MAX));
  apply_rendezvous_message(
      world, job::identity::pmi_broadcast(number, id.rank, message(id.local_world_size == id.world_size), deadline));
}

void rendezvous_over_caller(World& world, const ExternalRendezvous& rendezvous, base::Deadline deadline) {
  const auto address = [&] {
    const base::net::Address towards{rendezvous.towards, 1};
    const bool is_one_host = world.interface.empty() && is_loopback(towards.host);
    return is_one_host ? base::net::source_address_for(towards) : address_of_this_host(world, towards);
  };
  const std::string message = rendezvous.rank == 0 ? start_store_server(world, address()) : "";
  const std::string received = rendezvous.exchange(message, deadline);
  if (received.empty()) throw unpublished_address();
  apply_rendezvous_message(world, received);
}

void rendezvous_over_torchrun(World& world, base::Deadline deadline) {
  job::identity::Identity& id = world.identity;
  const base::net::Address torchrun = id.address;
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
  // torchrun's store persists across restarts, and its hosts may count restarts differently, so the message may be from
  // a rank 0 that has ended.
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

void check_transport(const std::string& asked, int size) {
  check_name("transport", asked, base::kTransports);
  if (asked == "self" && size > 1)
    throw base::UsageError("transport self requires a world of one rank, but there are " + std::to_string(size) +
                           " ranks; expected auto, shm, hierarchy, tcp, mpi or nccl");
  if (asked == "mpi" && !mpi::mpi_unavailable_reason().empty())
    throw base::UsageError("transport mpi: " + mpi::mpi_unavailable_reason());
  if (asked == "mpi") mpi::check_mpi_library();
}

std::string name(CrossHostTransport transport) {
  switch (transport) {
    case CrossHostTransport::kNone: break;
    case CrossHostTransport::kTcp: return "tcp";
    case CrossHostTransport::kMpi: return "mpi";
    case CrossHostTransport::kTcpAndMpi: return "tcp and mpi";
  }
  return "none";
}

CrossHostTransport choose_cross_host_transport(const job::identity::Identity& identity, const std::string& asked) {
  check_name("cross_host_transport", asked, base::kCrossHostTransports);
  if (asked == "mpi" && !mpi::mpi_unavailable_reason().empty())
    throw base::UsageError("cross_host_transport mpi: " + mpi::mpi_unavailable_reason());
  const std::string& source = identity.source;
  const bool mpi = (asked == "mpi" || (asked == "auto" && (source == "mpi" || source == "pmi" || source == "pmix"))) &&
                   mpi::mpi_unavailable_reason().empty();
  if (mpi) mpi::check_mpi_library();
  if (asked == "mpi") return CrossHostTransport::kMpi;
  return mpi ? CrossHostTransport::kTcpAndMpi : CrossHostTransport::kTcp;
}

TransportChoice choose_transport(const job::identity::Identity& identity, const std::string& asked,
                                 CrossHostTransport cross_host) {
  const int size = identity.world_size;
  const bool one_host = static_cast<int>(identity.local_ranks.size()) == size;
  if (asked == "shm" && !one_host)
    throw base::UsageError("transport shm requires all ranks on one host, but there are " +
                           std::to_string(identity.num_nodes) + " hosts; expected auto, hierarchy, tcp or mpi");
  if (asked == "hierarchy" && one_host)
    throw base::UsageError("transport hierarchy requires several hosts, but all " + std::to_string(size) +
                           " ranks share one; expected auto, shm, tcp or mpi");
  TransportChoice choice{.name = asked, .reason = "requested by name"};
  if (asked == "auto" || asked == "nccl")  // NCCL is for GPU tensors only
    choice = size == 1  ? TransportChoice{"self", CrossHostTransport::kNone, "a world of one"}
             : one_host ? TransportChoice{"shm", CrossHostTransport::kNone, "all ranks share a host"}
                        : TransportChoice{"hierarchy", CrossHostTransport::kNone, "ranks on several hosts"};
  if (choice.name == "hierarchy") choice.cross_host = cross_host;
  return choice;
}

void prepare_transport(World& world, const std::string& asked, base::Deadline deadline) {
  const bool mpi = world.transport == "mpi" || world.cross_host_transport == CrossHostTransport::kMpi ||
                   world.cross_host_transport == CrossHostTransport::kTcpAndMpi;
  if (mpi && world.identity.world_size > 1) mpi::init_mpi(world.identity.rank, world.identity.world_size);
  if (world.transport == "shm" || world.transport == "hierarchy")
    world.local_peers = shm::LocalPeers::connect(arena::Arena::this_process(), *world.store, world.identity.local_ranks,
                                                 world.identity.rank, deadline);
  if (asked == "nccl" && world.device.is_cpu())
    throw base::UsageError("transport nccl: " + world.gpu_unavailable_reason);
  if (world.device.is_cpu() || (world.identity.world_size == 1 && asked != "nccl")) return;
  NcclSupport support{.unavailable_reason = nccl::nccl_unavailable_reason()};
  if (support.unavailable_reason.empty()) {
    support.version = nccl::nccl_version();
    support.cannot_share_reason = nccl::cannot_share_gpu_reason();
  }
  negotiate_gpu_transport(world, asked, support, deadline);
}

std::shared_ptr<Transport> World::make_tcp(const std::string& name, const std::vector<int>& members,
                                           bool has_thread) const {
  return tcp::make_tcp_transport({.store = std::make_shared<job::PrefixStore>("tcp/" + name, store),
                                  .key = key,
                                  .members = members,
                                  .rank = rank_in(members),
                                  .address = address,
                                  .interface = interface,
                                  .timeout = timeout,
                                  .has_thread = has_thread});
}

std::shared_ptr<Transport> World::make_mpi(const std::string& name, const std::vector<int>& members) const {
  return mpi::make_mpi_transport({.store = store,
                                  .name = name,
                                  .members = members,
                                  .rank = rank_in(members),
                                  .deadline = base::Deadline::in(timeout)});
}

int World::rank_in(const std::vector<int>& members) const {
  return static_cast<int>(std::find(members.begin(), members.end(), identity.rank) - members.begin());
}

std::shared_ptr<Transport> World::make_transport(const std::string& name, const std::vector<int>& members,
                                                 const SplitParent& split_parent) const {
  const std::shared_ptr<Transport> parent = split_parent.from ? gpu::nccl_transport_of(*split_parent.from) : nullptr;
  if (members.size() == 1 && !is_alone_on_nccl()) {
    if (parent) nccl::skip_nccl_split(*parent);
    return self::make_self_transport();
  }
  const auto on_host = members.size() == 1 ? self::make_self_transport() : make_host_transport(name, members);
  if (device.is_cpu()) return on_host;
  const int group_rank = rank_in(members);
  const auto host_of = [&](int member) { return identity.host_indices[static_cast<std::size_t>(member)]; };
  const bool several = std::any_of(members.begin(), members.end(),
                                   [&](int member) { return host_of(member) != host_of(members.front()); });
  gpu::DeviceTransportOptions options{
      .host = on_host, .rank = group_rank, .size = static_cast<int>(members.size()), .spans_hosts = several};
  if (!uses_nccl) return gpu::make_device_transport(std::move(options));
  const nccl::NcclOptions all{.store = store,
                              .members = members,
                              .rank = group_rank,
                              .gpu = gpu,
                              .host = base::net::host_name(),
                              .address = address};
  options.make_nccl = [name, all](const std::string& part, const std::vector<int>& ranks) {
    nccl::NcclOptions some = all;
    some.store = std::make_shared<job::PrefixStore>("nccl/" + name + part, all.store);
    some.members.clear();
    for (const int rank : ranks) some.members.push_back(all.members[static_cast<std::size_t>(rank)]);
    some.rank = static_cast<int>(std::find(ranks.begin(), ranks.end(), all.rank) - ranks.begin());
    return nccl::make_nccl_transport(std::move(some));
  };
  if (parent) {
    nccl::NcclOptions child = all;
    child.store = std::make_shared<job::PrefixStore>("nccl/" + name, store);
    child.parent = parent;
    child.color = split_parent.color;
    options.nccl = nccl::make_nccl_transport(std::move(child));
  }
  return gpu::make_device_transport(std::move(options));
}

std::shared_ptr<Transport> World::make_host_transport(const std::string& name, const std::vector<int>& members) const {
  const int group_rank = rank_in(members);
  std::vector<int> hosts;
  for (const int member : members) hosts.push_back(identity.host_indices[static_cast<std::size_t>(member)]);
  const bool one_host = std::all_of(hosts.begin(), hosts.end(), [&](int host) { return host == hosts.front(); });
  if (transport == "shm" || (transport == "hierarchy" && one_host))
    return shm::make_shm_transport({.local_peers = local_peers,
                                    .store = std::make_shared<job::PrefixStore>("shm/" + name, store),
                                    .members = members,
                                    .rank = group_rank,
                                    .timeout = timeout});
  if (transport == "hierarchy")
    return hierarchy::make_hierarchy_transport(
        {.local_peers = local_peers,
         .store = std::make_shared<job::PrefixStore>("hierarchy/" + name, store),
         .members = members,
         .hosts = hosts,
         .rank = group_rank,
         .timeout = timeout,
         .make_cross_host = [this, &name](hierarchy::Scope scope, const std::string& part,
                                          const std::vector<int>& ranks) {
           const bool over_mpi =
               cross_host_transport == CrossHostTransport::kMpi ||
               (cross_host_transport == CrossHostTransport::kTcpAndMpi && scope == hierarchy::Scope::kSmall);
           if (over_mpi) return make_mpi(name + "/" + part, ranks);
           return make_tcp(name + "/" + part, ranks, scope != hierarchy::Scope::kSmall);
         }});
  if (transport == "mpi") return make_mpi(name, members);
  return make_tcp(name, members);
}

}  // namespace lockstep::comm
