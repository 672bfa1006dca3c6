#include "lockstep/launch/supervise/generation.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <string>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "lockstep/base/net/socket.h"
#include "lockstep/job/store_server.h"
#include "lockstep/launch/supervise/run.h"
#include "lockstep/launch/protocol/network_messages.h"

namespace lockstep::launcher {
namespace {

constexpr const char* kLoopback = "127.0.0.1";

std::string folder_of(int generation) { return generation == 0 ? "" : "/gen." + std::to_string(generation); }

RunOptions options_of(const Undertaking& job, int generation, const std::vector<std::size_t>& hosts) {
  RunOptions options = job.options;
  if (generation == 0) return options;
  if (!options.hosts.empty()) options.hosts.clear();
  for (const std::size_t host : hosts)
    if (!job.options.hosts.empty()) options.hosts.push_back(job.options.hosts[host]);
  options.attended.clear();  // whoever waited has seen an agent go
  options.inject.clear();    // a fault that happens each time would show nothing
  if (!options.output_dir.empty()) options.output_dir += folder_of(generation);
  return options;
}

std::vector<Node> nodes_of(Gathered& gathered, const std::vector<std::size_t>& numbers) {
  std::vector<Node> nodes;
  for (std::size_t i = 0; i < gathered.hosts.size(); ++i)
    nodes.push_back({.site = std::move(gathered.sites[i]),
                     .name = gathered.agents[i].host(),
                     .here = is_here(gathered.hosts[i]),
                     .step = gathered.hosts[i].step,
                     .wanted_interface = gathered.hosts[i].interface,
                     .number = numbers[i]});
  return nodes;
}

/// Ranks of each host. The agents of those that get none end with their input. Where hosts are missing there may be
/// `fewer` ranks than were asked for.
void share(const RunOptions& options, const Surroundings& surroundings, Gathered& gathered, std::vector<Node>& nodes,
           bool fewer) {
  std::vector<int> slots;
  for (std::size_t i = 0; i < nodes.size(); ++i)
    slots.push_back(options.hosts.empty() && options.ranks > 0 ? options.ranks
                    : gathered.hosts[i].slots > 0              ? gathered.hosts[i].slots
                                                               : default_ranks(options, surroundings, nodes[i]));
  const std::vector<int> ranks = fill_hosts(
      slots, fewer ? std::min(options.ranks, std::accumulate(slots.begin(), slots.end(), 0)) : options.ranks);
  std::vector<AgentLink> agents;
  std::vector<Node> used;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    if (ranks[i] == 0) continue;
    nodes[i].ranks = ranks[i];
    agents.push_back(std::move(gathered.agents[i]));
    used.push_back(std::move(nodes[i]));
  }
  gathered.agents = std::move(agents);
  nodes = std::move(used);
}

/// Where the store and the ranks of torch.distributed meet. Hosts elsewhere show first that they reach us and each
/// other.
void find_addresses(const RunOptions& options, Surroundings& surroundings, std::vector<AgentLink>& agents,
                    std::vector<Node>& nodes, int signals) {
  surroundings.store.host = surroundings.master.host = kLoopback;
  surroundings.master.port = nodes.front().site.master_port;
  if (std::all_of(nodes.begin(), nodes.end(), [](const Node& node) { return node.here; })) return;
  std::vector<std::string> interfaces;
  for (const Node& node : nodes)
    interfaces.push_back(node.wanted_interface.empty() ? options.interface : node.wanted_interface);
  Meeting meeting = meet(agents, interfaces, options.interface, signals);
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    nodes[i].interface = meeting.doors[i].interface;
    agents[i].tie(std::move(meeting.tethers[i]));
  }
  surroundings.store.host = meeting.launcher;
  surroundings.master.host = meeting.doors.front().address.host;
}

int count_ranks(const std::vector<Node>& nodes) {
  return std::accumulate(nodes.begin(), nodes.end(), 0, [](int sum, const Node& node) { return sum + node.ranks; });
}

std::string text_of(const WorldSize& world) {
  return std::to_string(world.ranks) + (world.ranks == 1 ? " rank on " : " ranks on ") + std::to_string(world.hosts) +
         (world.hosts == 1 ? " host" : " hosts");
}

/// The job goes to these hosts and no others. Those that keep them from meeting are `lost`.
Start prepare(const Undertaking& job, const RunOptions& options, int generation, Gathered gathered,
              const std::vector<std::size_t>& numbers, WorldSize& world, std::set<std::size_t>& lost) {
  Start start{.surroundings = job.surroundings, .agents = {}, .nodes = nodes_of(gathered, numbers), .opening = {}};
  start.surroundings.generation = generation;
  start.surroundings.run_dir += folder_of(generation);
  share(options, start.surroundings, gathered, start.nodes, generation > 0);
  start.agents = std::move(gathered.agents);
  const WorldSize now{count_ranks(start.nodes), start.nodes.size()};
  if (generation > 0 && world.ranks > 0 && now != world)
    start.opening = "the job goes on with " + text_of(now) + " instead of " + text_of(world);
  world = now;
  // Beside the store two files of output of each rank, a meeting at each of our addresses, and our own.
  base::allow_files(job::files_of_store(now.ranks) +
                    static_cast<std::uint64_t>(options.output_dir.empty() ? 0 : 2 * now.ranks) +
                    (now.hosts > 1 ? now.hosts * (8 + base::interface_addresses().size()) : 8) + 56);
  try {
    find_addresses(options, start.surroundings, start.agents, start.nodes, job.signals);
  } catch (const base::Error& error) {
    if (const auto* not_met = dynamic_cast<const NotMet*>(&error))
      for (const std::size_t agent : not_met->agents()) lost.insert(start.nodes[agent].number);
    end_all(start.agents);
    throw;
  }
  return start;
}

/// Later the same hosts were there before: that they are not any more is no mistake of a person's.
void need_hosts(Gathered& gathered, std::size_t least, int generation) {
  try {
    need(gathered, least);
  } catch (const base::UsageError& error) {
    if (generation == 0) throw;
    throw base::Error(base::Cause::kPeerUnreachable, error.what(), error.hint());
  }
}

}  // namespace

Ended run_generation(const Undertaking& job, int generation, const std::vector<std::size_t>& hosts, std::size_t least,
                     WorldSize& world) {
  const RunOptions options = options_of(job, generation, hosts);
  std::set<std::size_t> lost;
  try {
    Gathered gathered =
        gather(options, job.cargo, silence_of_agents(pulse_limits(options, job.surroundings.environment)),
               job.max_files, job.signals);
    find_twins(gathered);
    std::vector<std::size_t> numbers;
    for (std::size_t i = 0; i < gathered.failed.size(); ++i)
      if (gathered.failed[i])
        lost.insert(hosts[i]);
      else
        numbers.push_back(hosts[i]);
    need_hosts(gathered, least, generation);
    Ended ended = supervise(options, prepare(job, options, generation, std::move(gathered), numbers, world, lost),
                            job.signals, job.not_ours);
    ended.lost.merge(lost);
    return ended;
  } catch (const base::Error& error) {
    if (generation == 0) throw;
    job::Fatal fatal = fatal_of(error);
    fatal.gen = generation;
    Ended ended;
    ended.verdict = Verdict{std::move(fatal), base::exit_code(error.cause()), {}};
    ended.attempt.began = false;
    ended.lost = std::move(lost);
    return ended;
  }
}

}  // namespace lockstep::launcher
