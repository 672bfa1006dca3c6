#include "lockstep/launch/launcher.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <numeric>
#include <utility>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/socket.h"
#include "lockstep/job/store_server.h"
#include "lockstep/launch/allocation.h"
#include "lockstep/launch/gather.h"
#include "lockstep/launch/meeting.h"
#include "lockstep/launch/output.h"
#include "lockstep/launch/plan.h"
#include "lockstep/launch/process.h"
#include "lockstep/launch/program.h"
#include "lockstep/launch/supervisor.h"

namespace lockstep::launcher {
namespace {

constexpr const char* kLoopback = "127.0.0.1";

/// "train-20261122-091503-4711": of no other run.
std::string default_name(const std::string& program) {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  ::localtime_r(&now, &local);
  char time[32];
  std::strftime(time, sizeof time, "-%Y%m%d-%H%M%S-", &local);
  return std::filesystem::path(program).filename().string() + time + std::to_string(::getpid());
}

std::vector<Node> nodes_of(Gathered& gathered) {
  std::vector<Node> nodes;
  for (std::size_t i = 0; i < gathered.hosts.size(); ++i)
    nodes.push_back({.site = std::move(gathered.sites[i]), .name = gathered.agents[i].host(), .here = is_here(gathered.hosts[i]), .step = gathered.hosts[i].step, .wanted_interface = gathered.hosts[i].interface});
  return nodes;
}

/// Ranks of each host. The agents of those that get none end with their input.
void share(const RunOptions& options, const Surroundings& surroundings, Gathered& gathered, std::vector<Node>& nodes) {
  std::vector<int> slots;
  for (std::size_t i = 0; i < nodes.size(); ++i)
    slots.push_back(options.hosts.empty() && options.ranks > 0 ? options.ranks
                    : gathered.hosts[i].slots > 0              ? gathered.hosts[i].slots
                                                               : default_ranks(options, surroundings, nodes[i]));
  const std::vector<int> ranks = fill_hosts(slots, options.ranks);
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

/// This program, and the one to run where it was named by a path: what PATH finds is there as well.
Cargoes cargo_for(const RunOptions& options) {
  if (!options.ship || std::all_of(options.hosts.begin(), options.hosts.end(), is_here)) return nullptr;
  std::vector<Cargo> cargo = {cargo_of(own_path())};
  const std::string& program = options.command.front();
  if (program.find('/') != std::string::npos) cargo.push_back(cargo_of(program[0] == '/' || options.directory.empty() ? program : options.directory + "/" + program));
  return std::make_shared<const std::vector<Cargo>>(std::move(cargo));
}

/// Where the store and the ranks of torch.distributed meet. Hosts elsewhere show first that they reach us and each other.
void find_addresses(const RunOptions& options, Surroundings& surroundings, std::vector<AgentLink>& agents, std::vector<Node>& nodes, int signals) {
  surroundings.store.host = surroundings.master.host = kLoopback;
  surroundings.master.port = nodes.front().site.master_port;
  if (std::all_of(nodes.begin(), nodes.end(), [](const Node& node) { return node.here; })) return;
  std::vector<std::string> interfaces;
  for (const Node& node : nodes) interfaces.push_back(node.wanted_interface.empty() ? options.interface : node.wanted_interface);
  Meeting meeting = meet(agents, interfaces, options.interface, signals);
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    nodes[i].interface = meeting.doors[i].interface;
    agents[i].tie(std::move(meeting.tethers[i]));
  }
  surroundings.store.host = meeting.launcher;
  surroundings.master.host = meeting.doors.front().address.host;
}

}  // namespace

std::vector<int> handled_signals() {
  std::vector<int> handled = {SIGCHLD, SIGUSR1, SIGUSR2};
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction action {};
    if (::sigaction(signal, nullptr, &action) == 0 && action.sa_handler != SIG_IGN) handled.push_back(signal);
  }
  return handled;
}

std::string program_of(const HostOptions& options, const std::string& name) {
  const bool here = options.hosts.empty() || std::any_of(options.hosts.begin(), options.hosts.end(), is_here);
  const bool relative = name.find('/') != std::string::npos && name[0] != '/';
  if (name.find('/') != std::string::npos && (!here || (relative && !options.directory.empty()))) return name;
  return find_program(name, base::Env::process().path.value_or("/usr/local/bin:/usr/bin:/bin"));
}

job::Fatal fatal_of(const base::Error& error) {
  job::Fatal fatal;
  fatal.cause = error.cause();
  fatal.host = base::host_name();
  fatal.pid = ::getpid();
  fatal.detail = error.what();
  fatal.hint = error.hint();
  return fatal;
}

int run(RunOptions options) {
  options.hosts = with_allocation(std::move(options.hosts), options.env_from, base::Env::process());
  Surroundings surroundings;
  surroundings.directory = options.directory.empty() ? "" : std::filesystem::absolute(options.directory).string();
  surroundings.here = std::filesystem::current_path();
  surroundings.program = program_of(options, options.command.front());
  surroundings.environment = with_exports(own_environment(), options.exports);
  for (const std::string& variable : options.exports) surroundings.exported.push_back(variable.substr(0, variable.find('=')));
  surroundings.columns = terminal_columns();
  surroundings.run_dir = "runs/" + (options.name.empty() ? default_name(surroundings.program) : options.name);
  std::vector<pid_t> not_ours = has_children() ? descendants() : std::vector<pid_t>();  // left us by a shell's exec
  base::Fd signals(signal_descriptor(handled_signals()));  // before any thread exists, so that none takes a signal
  become_subreaper();
  const std::uint64_t max_files = base::allow_files(8 * options.hosts.size() + 64);
  Gathered gathered = gather(options, cargo_for(options), silence_of_agents(pulse_limits(options, surroundings.environment)), max_files, signals.get());
  need_all(gathered);
  std::vector<Node> nodes = nodes_of(gathered);
  share(options, surroundings, gathered, nodes);
  const int num_ranks = std::accumulate(nodes.begin(), nodes.end(), 0, [](int sum, const Node& node) { return sum + node.ranks; });
  // Beside the store two files of output of each rank, a meeting at each of our addresses, and our own.
  base::allow_files(job::files_of_store(num_ranks) + static_cast<std::uint64_t>(options.output_dir.empty() ? 0 : 2 * num_ranks) +
                    (nodes.size() > 1 ? nodes.size() * (8 + base::interface_addresses().size()) : 8) + 56);
  find_addresses(options, surroundings, gathered.agents, nodes, signals.get());
  return supervise(options, std::move(surroundings), std::move(gathered.agents), std::move(nodes), std::move(signals), std::move(not_ours));
}

}  // namespace lockstep::launcher
