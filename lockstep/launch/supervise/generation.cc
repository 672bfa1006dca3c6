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
#include "lockstep/launch/protocol/network_messages.h"
#include "lockstep/launch/supervise/run.h"

namespace lockstep::launcher {
namespace {

constexpr const char* kLoopback = "127.0.0.1";

std::string generation_folder(int generation) { return generation == 0 ? "" : "/gen." + std::to_string(generation); }

RunOptions options_for(const JobSpec& job, int generation, const std::vector<std::size_t>& hosts) {
  RunOptions options = job.options;
  if (generation == 0) return options;
  if (!options.hosts.empty()) options.hosts.clear();
  for (const std::size_t host : hosts)
    if (!job.options.hosts.empty()) options.hosts.push_back(job.options.hosts[host]);
  options.slurm_step.clear();  // whoever waited has seen an agent go
  options.inject.clear();      // a fault that happens each time would show nothing
  if (!options.output_dir.empty()) options.output_dir += generation_folder(generation);
  return options;
}

std::vector<Node> make_nodes(StartedAgents& started, const std::vector<std::size_t>& numbers) {
  std::vector<Node> nodes;
  for (std::size_t i = 0; i < started.hosts.size(); ++i)
    nodes.push_back({.info = std::move(started.infos[i]),
                     .name = started.agents[i].host(),
                     .here = is_local_host(started.hosts[i]),
                     .step = started.hosts[i].step,
                     .wanted_interface = started.hosts[i].interface,
                     .number = numbers[i]});
  return nodes;
}

/// Ranks of each host. The agents of those that get none end with their input. Where hosts are missing there may be
/// `fewer` ranks than were asked for.
void assign_ranks(const RunOptions& options, const LaunchContext& context, StartedAgents& started,
                  std::vector<Node>& nodes, bool fewer) {
  std::vector<int> slots;
  for (std::size_t i = 0; i < nodes.size(); ++i)
    slots.push_back(options.hosts.empty() && options.ranks > 0 ? options.ranks
                    : started.hosts[i].slots > 0               ? started.hosts[i].slots
                                                               : default_ranks(options, context, nodes[i]));
  const std::vector<int> ranks = fill_slots(
      slots, fewer ? std::min(options.ranks, std::accumulate(slots.begin(), slots.end(), 0)) : options.ranks);
  std::vector<AgentLink> agents;
  std::vector<Node> used;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    if (ranks[i] == 0) continue;
    nodes[i].ranks = ranks[i];
    agents.push_back(std::move(started.agents[i]));
    used.push_back(std::move(nodes[i]));
  }
  started.agents = std::move(agents);
  nodes = std::move(used);
}

/// Where the store and the ranks of torch.distributed meet. Hosts elsewhere show first that they reach us and each
/// other.
void choose_addresses(const RunOptions& options, LaunchContext& context, std::vector<AgentLink>& agents,
                      std::vector<Node>& nodes, int signals) {
  context.store.host = context.master.host = kLoopback;
  context.master.port = nodes.front().info.master_port;
  if (std::all_of(nodes.begin(), nodes.end(), [](const Node& node) { return node.here; })) return;
  std::vector<std::string> interfaces;
  for (const Node& node : nodes)
    interfaces.push_back(node.wanted_interface.empty() ? options.interface : node.wanted_interface);
  NetworkPlan network = check_network(agents, interfaces, options.interface, signals);
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    nodes[i].interface = network.routes[i].interface;
    agents[i].set_liveness_fd(std::move(network.liveness_fds[i]));
  }
  context.store.host = network.launcher;
  context.master.host = network.routes.front().address.host;
}

int count_ranks(const std::vector<Node>& nodes) {
  return std::accumulate(nodes.begin(), nodes.end(), 0, [](int sum, const Node& node) { return sum + node.ranks; });
}

std::string text_of(const WorldSize& world) {
  return std::to_string(world.ranks) + (world.ranks == 1 ? " rank on " : " ranks on ") + std::to_string(world.hosts) +
         (world.hosts == 1 ? " host" : " hosts");
}

/// The job goes to these hosts and no others. Those that keep them from meeting are `lost`.
PreparedJob prepare_job(const JobSpec& job, const RunOptions& options, int generation, StartedAgents started,
                        const std::vector<std::size_t>& numbers, WorldSize& world, std::set<std::size_t>& lost) {
  PreparedJob start{.context = job.context, .agents = {}, .nodes = make_nodes(started, numbers), .start_note = {}};
  start.context.generation = generation;
  start.context.run_dir += generation_folder(generation);
  assign_ranks(options, start.context, started, start.nodes, generation > 0);
  start.agents = std::move(started.agents);
  const WorldSize now{count_ranks(start.nodes), start.nodes.size()};
  if (generation > 0 && world.ranks > 0 && now != world)
    start.start_note = "the job goes on with " + text_of(now) + " instead of " + text_of(world);
  world = now;
  // Beside the store two files of output of each rank, a meeting at each of our addresses, and our own.
  base::raise_fd_limit(job::store_fd_count(now.ranks) +
                       static_cast<std::uint64_t>(options.output_dir.empty() ? 0 : 2 * now.ranks) +
                       (now.hosts > 1 ? now.hosts * (8 + base::interface_addresses().size()) : 8) + 56);
  try {
    choose_addresses(options, start.context, start.agents, start.nodes, job.signals);
  } catch (const base::Error& error) {
    if (const auto* unreachable = dynamic_cast<const Unreachable*>(&error))
      for (const std::size_t agent : unreachable->agents()) lost.insert(start.nodes[agent].number);
    kill_agents(start.agents);
    throw;
  }
  return start;
}

/// Later the same hosts were there before: that they are not any more is no mistake of a person's.
void require_hosts_again(StartedAgents& started, std::size_t least, int generation) {
  try {
    require_hosts(started, least);
  } catch (const base::UsageError& error) {
    if (generation == 0) throw;
    throw base::Error(base::Cause::kPeerUnreachable, error.what(), error.hint());
  }
}

}  // namespace

JobOutcome run_generation(const JobSpec& job, int generation, const std::vector<std::size_t>& hosts, std::size_t least,
                          WorldSize& world) {
  const RunOptions options = options_for(job, generation, hosts);
  std::set<std::size_t> lost;
  try {
    StartedAgents started =
        start_agents(options, job.cargo, agent_silence_limit(health_limits(options, job.context.environment)),
                     job.max_files, job.signals);
    mark_duplicate_hosts(started);
    std::vector<std::size_t> numbers;
    for (std::size_t i = 0; i < started.failed.size(); ++i)
      if (started.failed[i])
        lost.insert(hosts[i]);
      else
        numbers.push_back(hosts[i]);
    require_hosts_again(started, least, generation);
    JobOutcome ended =
        supervise(options, prepare_job(job, options, generation, std::move(started), numbers, world, lost), job.signals,
                  job.inherited_children);
    ended.lost.merge(lost);
    return ended;
  } catch (const base::Error& error) {
    if (generation == 0) throw;
    job::Fatal fatal = to_fatal(error);
    fatal.gen = generation;
    JobOutcome ended;
    ended.verdict = Verdict{std::move(fatal), base::exit_code(error.cause()), {}};
    ended.attempt.started = false;
    ended.lost = std::move(lost);
    return ended;
  }
}

}  // namespace lockstep::launcher
