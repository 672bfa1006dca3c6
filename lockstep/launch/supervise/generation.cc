#include "lockstep/launch/supervise/generation.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "lockstep/base/net/socket.h"
#include "lockstep/base/parse.h"
#include "lockstep/job/injection.h"
#include "lockstep/job/store_server.h"
#include "lockstep/launch/hosts/network_check.h"
#include "lockstep/launch/supervise/agent_verdict.h"

namespace lockstep::launcher::supervise {
namespace {

constexpr const char* kLoopback = "127.0.0.1";

/// The same files, of which this job has used the copies already.
hosts::StagedFiles in_use(const hosts::StagedFiles& files) {
  if (!files) return nullptr;
  auto copies = std::make_shared<std::vector<hosts::StagedFile>>(*files);
  for (hosts::StagedFile& file : *copies) file.is_in_use = true;
  return copies;
}

std::string generation_folder(int generation) { return generation == 0 ? "" : "/gen." + std::to_string(generation); }

cli::RunOptions options_for(const JobSpec& job, int generation, const std::vector<std::size_t>& hosts) {
  cli::RunOptions options = job.options;
  if (generation == 0) return options;
  options.hosts.clear();
  for (const std::size_t host : hosts)
    if (!job.options.hosts.empty()) options.hosts.push_back(job.options.hosts[host]);
  options.slurm_step.clear();  // the waiting tasks ended with the agents of generation 0
  options.inject.clear();      // an injected fault happens once per job, not in each generation
  if (!options.output_dir.empty()) options.output_dir += generation_folder(generation);
  return options;
}

std::vector<plan::Node> make_nodes(hosts::StartedAgents& started, const std::vector<std::size_t>& numbers,
                                   bool pods_have_key) {
  std::vector<plan::Node> nodes;
  for (std::size_t i = 0; i < started.hosts.size(); ++i)
    nodes.push_back({.info = std::move(*started.infos[i]),
                     .name = started.agents[i].host(),
                     .is_local = hosts::is_local_host(started.hosts[i]),
                     .reads_key = pods_have_key && started.hosts[i].is_pod && !started.hosts[i].is_local,
                     .is_slurm = started.hosts[i].is_slurm,
                     .wanted_interface = started.hosts[i].interface,
                     .number = numbers[i]});
  return nodes;
}

/// Assigns ranks to hosts. Drops the agents of hosts without ranks; they exit at the end of their input. With `fewer`,
/// assigns fewer ranks than requested if the hosts have too few slots.
void assign_ranks(const cli::RunOptions& options, const plan::LaunchContext& context, hosts::StartedAgents& started,
                  std::vector<plan::Node>& nodes, bool fewer) {
  std::vector<int> slots;
  for (std::size_t i = 0; i < nodes.size(); ++i)
    slots.push_back(options.hosts.empty() && options.ranks > 0 ? options.ranks
                    : started.hosts[i].slots > 0               ? started.hosts[i].slots
                                                               : plan::default_ranks(options, context, nodes[i]));
  const std::vector<int> ranks = plan::fill_slots(
      slots, fewer ? std::min(options.ranks, std::accumulate(slots.begin(), slots.end(), 0)) : options.ranks);
  std::vector<hosts::AgentLink> agents;
  std::vector<plan::Node> used;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    if (ranks[i] == 0) continue;
    nodes[i].ranks = ranks[i];
    agents.push_back(std::move(started.agents[i]));
    used.push_back(std::move(nodes[i]));
  }
  started.agents = std::move(agents);
  nodes = std::move(used);
}

/// Chooses the addresses of the store and of torch.distributed's rendezvous. If there are remote hosts, checks first
/// that each reaches the launcher and the other hosts.
void choose_addresses(const cli::RunOptions& options, plan::LaunchContext& context,
                      std::vector<hosts::AgentLink>& agents, std::vector<plan::Node>& nodes, int signals) {
  context.store.host = context.master.host = kLoopback;
  context.master.port = nodes.front().info.master_port;
  if (std::ranges::all_of(nodes, &plan::Node::is_local)) return;
  std::vector<std::string> interfaces;
  for (const plan::Node& node : nodes)
    interfaces.push_back(node.wanted_interface.empty() ? options.interface : node.wanted_interface);
  hosts::NetworkPlan network = hosts::check_network(agents, interfaces, options.interface, signals);
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    nodes[i].interface = network.routes[i].interface;
    agents[i].set_liveness_fd(std::move(network.liveness_fds[i]));
  }
  context.store.host = network.launcher;
  context.master.host = network.routes.front().address.host;
}

std::string text_of(const WorldSize& world) {
  return std::to_string(world.ranks) + (world.ranks == 1 ? " rank on " : " ranks on ") + std::to_string(world.hosts) +
         (world.hosts == 1 ? " host" : " hosts");
}

void check_injected_rank(const std::string& injection, int ranks) {
  const int rank = job::parse_injection("--inject", injection).rank;
  if (rank >= ranks)
    throw base::UsageError("--inject is " + base::quoted(injection, 80) + ", but this job has " +
                           std::to_string(ranks) + (ranks == 1 ? " rank" : " ranks") + "; expected a rank from 0 to " +
                           std::to_string(ranks - 1));
}

/// Assigns ranks to the started hosts and checks the network. Adds hosts that the others do not reach to `lost`.
PreparedJob prepare_job(const JobSpec& job, const cli::RunOptions& options, int generation,
                        hosts::StartedAgents started, const std::vector<std::size_t>& numbers, WorldSize& world,
                        std::set<std::size_t>& lost) {
  PreparedJob prepared{.context = job.context,
                       .agents = {},
                       .nodes = make_nodes(started, numbers, job.context.key.is_set()),
                       .start_note = {}};
  prepared.context.generation = generation;
  prepared.context.run_dir += generation_folder(generation);
  assign_ranks(options, prepared.context, started, prepared.nodes, generation > 0);
  prepared.agents = std::move(started.agents);
  const WorldSize now{plan::count_ranks(prepared.nodes), prepared.nodes.size()};
  if (generation > 0 && world.ranks > 0 && now != world)
    prepared.start_note = "the job continues with " + text_of(now) + " instead of " + text_of(world);
  world = now;
  if (!options.inject.empty()) check_injected_rank(options.inject, now.ranks);
  // The descriptors are those of the store, two output files per rank, the connections of the network check at each of
  // our addresses, and our own.
  base::raise_fd_limit(job::store_fd_count(now.ranks) +
                       static_cast<std::uint64_t>(options.output_dir.empty() ? 0 : 2 * now.ranks) +
                       (now.hosts > 1 ? now.hosts * (8 + base::net::interface_addresses().size()) : 8) + 56);
  try {
    choose_addresses(options, prepared.context, prepared.agents, prepared.nodes, job.signals);
  } catch (const base::Error& error) {
    if (const auto* unreachable = dynamic_cast<const hosts::Unreachable*>(&error))
      for (const std::size_t agent : unreachable->agents()) lost.insert(prepared.nodes[agent].number);
    hosts::kill_agents(prepared.agents);
    throw;
  }
  return prepared;
}

/// Returns the agents of the pods among `options.hosts`, which have the numbers `hosts`. In a later generation that may
/// start on fewer hosts, pods that do not answer at once are left out.
std::vector<std::optional<hosts::PodMeeting::Agent>> connect_pods(const JobSpec& job, const cli::RunOptions& options,
                                                                  const std::vector<std::size_t>& hosts,
                                                                  bool needs_all) {
  if (!job.pods) return {};
  std::vector<std::size_t> others;
  for (std::size_t i = 0; i < hosts.size(); ++i)
    if (!options.hosts[i].is_local) others.push_back(hosts[i]);
  return job.pods->connect_agents(others, needs_all, needs_all ? job.pods_timeout : options.connect_timeout,
                                  job.signals);
}

/// Calls require_hosts(). A later generation uses hosts that worked before, so its failures are not usage errors.
void require_hosts_again(hosts::StartedAgents& started, std::size_t min_hosts, int generation) {
  try {
    hosts::require_hosts(started, min_hosts);
  } catch (const base::UsageError& error) {
    if (generation == 0) throw;
    throw base::Error(base::Cause::kPeerUnreachable, error.what(), error.hint());
  }
}

}  // namespace

std::size_t count_hosts(const cli::RunOptions& options) { return std::max<std::size_t>(1, options.hosts.size()); }

JobOutcome run_generation(const JobSpec& job, int generation, const std::vector<std::size_t>& hosts,
                          std::size_t min_hosts, WorldSize& world) {
  const cli::RunOptions options = options_for(job, generation, hosts);
  std::set<std::size_t> lost;
  try {
    hosts::StartedAgents started =
        hosts::start_agents(options, generation == 0 ? job.staged_files : in_use(job.staged_files),
                            agent_silence_limit(plan::health_limits(options, job.context.environment)), job.max_files,
                            job.signals, connect_pods(job, options, hosts, min_hosts == count_hosts(job.options)));
    hosts::mark_duplicate_hosts(started);
    std::vector<std::size_t> numbers;
    for (std::size_t i = 0; i < started.failed.size(); ++i)
      if (started.failed[i])
        lost.insert(hosts[i]);
      else
        numbers.push_back(hosts[i]);
    require_hosts_again(started, min_hosts, generation);
    JobOutcome outcome =
        supervise(options, prepare_job(job, options, generation, std::move(started), numbers, world, lost), job.signals,
                  job.inherited_children);
    outcome.lost_hosts.merge(lost);
    return outcome;
  } catch (const base::Error& error) {
    if (generation == 0) throw;
    job::Fatal fatal = job::to_fatal(error);
    fatal.gen = generation;
    JobOutcome outcome;
    outcome.verdict = verdict_on(std::move(fatal));
    outcome.attempt.started = false;
    outcome.lost_hosts = std::move(lost);
    return outcome;
  }
}

}  // namespace lockstep::launcher::supervise
