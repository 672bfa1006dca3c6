#include "lockstep/launch/doctor/doctor.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <numeric>
#include <optional>
#include <utility>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/launch/slurm/allocation.h"
#include "lockstep/launch/protocol/connectivity_probe.h"
#include "lockstep/launch/doctor/diagnosis.h"
#include "lockstep/launch/doctor/findings_table.h"
#include "lockstep/launch/doctor/doctor_messages.h"
#include "lockstep/launch/hosts/start_agents.h"
#include "lockstep/launch/hosts/agent_query.h"
#include "lockstep/launch/supervise/run.h"
#include "lockstep/launch/protocol/network_messages.h"
#include "lockstep/launch/plan/job_plan.h"
#include "lockstep/launch/process/process.h"

namespace lockstep::launcher {
namespace {

using namespace std::chrono_literals;

constexpr int kLauncher = -1;                  // its number in a Crossing
constexpr auto kAnswers = 10s;                 // what takes no time there; they give a connection 5 s
constexpr auto kExamines = 90s;                // tools have 60 s, and a slow file system 10 s
constexpr auto kMeasures = 15s;                // 5 s to connect and 5 to measure
constexpr std::size_t kMostHostsInPairs = 16;  // 120 pairs; beyond, neighbours

using Numbers = std::vector<std::size_t>;

class Visit {
 public:
  Visit(const DoctorOptions& options, Gathered gathered, int signals)
      : options_(options),
        gathered_(std::move(gathered)),
        crossing_(kLauncher, Crossing::new_token()),
        inquiry_(gathered_.agents, crossing_, signals,
                 [this](std::size_t i, const std::string& why) { lose(i, why); }) {}

  Ward run(const Surroundings& surroundings);
  /// Ends the agents.
  void leave();

 private:
  void begin();
  Numbers present() const;
  void lose(std::size_t i, const std::string& why);
  void read_clocks();
  void examine_all(const Surroundings& surroundings);
  void meet();
  void choose_doors(const std::vector<MeetReply>& replies, std::size_t num_ways);
  void try_pairs(int way);
  void measure_pairs();
  void measure(PairFile& pair);

  const DoctorOptions& options_;
  Gathered gathered_;
  Crossing crossing_;
  Inquiry inquiry_;
  Ward ward_;
};

void Visit::begin() {
  ward_.model_bytes = options_.model_bytes;
  ward_.mpi = options_.mpi;
  for (std::size_t i = 0; i < gathered_.agents.size(); ++i) {
    PatientFile file;
    file.name = gathered_.hosts[i].name.empty() ? base::host_name() : gathered_.hosts[i].name;
    file.way = gathered_.agents[i].way();
    file.reached = !gathered_.sites[i].host.empty();
    file.took = gathered_.took[i];
    file.site = gathered_.sites[i];
    if (gathered_.failed[i]) {
      file.failed = gathered_.failed[i]->what();
      const std::string who = "host " + base::quoted(gathered_.hosts[i].name, 253) + ": ";  // the table says it, too
      if (file.failed.rfind(who, 0) == 0) file.failed.erase(0, who.size());
      file.hint = gathered_.failed[i]->hint();
    }
    ward_.hosts.push_back(std::move(file));
  }
}

/// Those that can be asked.
Numbers Visit::present() const {
  Numbers all;
  for (std::size_t i = 0; i < ward_.hosts.size(); ++i)
    if (ward_.hosts[i].reached && ward_.hosts[i].failed.empty() && ward_.hosts[i].lost.empty()) all.push_back(i);
  return all;
}

void Visit::lose(std::size_t i, const std::string& why) {
  ward_.hosts[i].lost = why;
  gathered_.agents[i].kill();
}

void Visit::read_clocks() {
  using Clock = std::chrono::system_clock;
  std::vector<Clock::time_point> asked(ward_.hosts.size());
  inquiry_.ask(
      present(), FrameKind::kTime,
      [&](std::size_t i) {
        asked[i] = Clock::now();
        return std::string();
      },
      FrameKind::kClock, kAnswers,
      [&](std::size_t i, const std::string& payload) {
        const Clock::time_point there{
            std::chrono::duration_cast<Clock::duration>(std::chrono::nanoseconds(decode_numbers(payload, 1)[0]))};
        ward_.hosts[i].ahead = there - (asked[i] + (Clock::now() - asked[i]) / 2);
      });
}

void Visit::examine_all(const Surroundings& surroundings) {
  const auto order = [&](std::size_t i) {
    const Node node{.site = ward_.hosts[i].site, .here = is_here(gathered_.hosts[i])};
    std::vector<std::string> command = options_.command;
    if (!command.empty()) command.front() = surroundings.program;
    return encode_examine(
        {.command = std::move(command),
         .directory = surroundings.directory.empty() && !node.here ? surroundings.here : surroundings.directory,
         .add_to_own = !node.here,
         .environment = merged(inherited_by(node, surroundings), {}),
         .mpi = options_.mpi});
  };
  inquiry_.ask(present(), FrameKind::kExamine, order, FrameKind::kExamined, kExamines,
               [&](std::size_t i, const std::string& payload) { ward_.hosts[i].found = decode_examined(payload); });
}

/// As launcher::meet(), but whoever does not come is a finding.
void Visit::meet() {
  const std::vector<base::InterfaceAddress> own = launcher_addresses(options_.interface);
  MeetOrder order{.token = crossing_.token()};
  for (const base::InterfaceAddress& one : own) order.launcher.push_back(crossing_.listen(one.address));
  std::vector<MeetReply> replies(ward_.hosts.size());
  const auto ordered = [&](std::size_t i) {
    order.self = static_cast<int>(i);
    order.interface = gathered_.hosts[i].interface.empty() ? options_.interface : gathered_.hosts[i].interface;
    return encode_meet(order);
  };
  inquiry_.ask(present(), FrameKind::kMeet, ordered, FrameKind::kMet, kAnswers,
               [&](std::size_t i, const std::string& payload) { replies[i] = decode_met(payload); });
  choose_doors(replies, own.size());
}

/// Those at the address of ours that most hosts reach.
void Visit::choose_doors(const std::vector<MeetReply>& replies, std::size_t num_ways) {
  std::vector<int> counts(num_ways);
  for (const MeetReply& reply : replies)
    for (const Door& door : reply.doors)
      if (door.launcher >= 0 && static_cast<std::size_t>(door.launcher) < num_ways)
        ++counts[static_cast<std::size_t>(door.launcher)];
  const auto way = static_cast<int>(std::max_element(counts.begin(), counts.end()) - counts.begin());
  for (std::size_t i = 0; i < replies.size(); ++i) {
    const auto door = std::find_if(replies[i].doors.begin(), replies[i].doors.end(),
                                   [&](const Door& one) { return one.launcher == way; });
    if (door != replies[i].doors.end())
      ward_.hosts[i].door = *door;
    else if (!replies[i].error.empty())
      ward_.hosts[i].no_door = "it does not reach this host: " + replies[i].error;
  }
  try_pairs(way);
}

/// All dial all.
void Visit::try_pairs(int way) {
  ProbeOrder order{.launcher = way, .peers = {}};
  Numbers with_door;
  for (const std::size_t i : present())
    if (ward_.hosts[i].door) with_door.push_back(i);
  for (const PatientFile& host : ward_.hosts) order.peers.push_back(host.door ? host.door->address : base::Address());
  std::vector<std::vector<ProbeFailure>> failures(ward_.hosts.size());
  inquiry_.ask(
      with_door, FrameKind::kProbe, [&](std::size_t) { return encode_probe(order); }, FrameKind::kProbed, kAnswers,
      [&](std::size_t i, const std::string& payload) { failures[i] = decode_probed(payload); });
  const auto why = [&](std::size_t from, std::size_t to) {
    for (const ProbeFailure& failure : failures[from])
      if (failure.node == static_cast<int>(to))
        return ward_.hosts[from].name + " does not reach " + order.peers[to].host + ": " + failure.why;
    return std::string();
  };
  for (std::size_t a = 0; a < with_door.size(); ++a)
    for (std::size_t b = a + 1; b < with_door.size(); ++b) {
      const std::size_t from = with_door[a], to = with_door[b];
      const std::string there = why(from, to), back = why(to, from);
      const bool reaches = there.empty() && back.empty();
      const bool measured = with_door.size() <= kMostHostsInPairs || b == a + 1;
      if (!reaches || measured)
        ward_.pairs.push_back({.from = from,
                               .to = to,
                               .reaches = reaches,
                               .speed = {.error = there.empty() || back.empty() ? there + back : there + "; " + back}});
    }
}

/// One pair after the other, so that they share no link.
void Visit::measure_pairs() {
  for (PairFile& pair : ward_.pairs)
    if (pair.reaches) measure(pair);
}

void Visit::measure(PairFile& pair) {
  const Numbers here = present();
  for (const std::size_t end : {pair.from, pair.to})
    if (std::find(here.begin(), here.end(), end) == here.end()) {
      pair.speed.error = ward_.hosts[end].name + " does not answer any more";
      return;
    }
  const std::string token = Crossing::new_token();
  ListenReply reply{.address = {}, .error = "no answer"};
  const auto listen = [&](std::size_t) {
    return encode_listen({.self = static_cast<int>(pair.to),
                          .caller = static_cast<int>(pair.from),
                          .token = token,
                          .host = ward_.hosts[pair.to].door->address.host});
  };
  inquiry_.ask({pair.to}, FrameKind::kListen, listen, FrameKind::kListening, kMeasures,
               [&](std::size_t, const std::string& payload) { reply = decode_listening(payload); });
  if (!reply.error.empty()) {
    pair.speed.error = reply.error;
    return;
  }
  pair.speed.error = "no answer";
  const auto order = [&](std::size_t) {
    return encode_measure({.self = static_cast<int>(pair.from),
                           .peer = static_cast<int>(pair.to),
                           .token = token,
                           .address = reply.address});
  };
  inquiry_.ask({pair.from}, FrameKind::kMeasure, order, FrameKind::kMeasured, kMeasures,
               [&](std::size_t, const std::string& payload) { pair.speed = decode_measured(payload); });
}

Ward Visit::run(const Surroundings& surroundings) {
  begin();
  read_clocks();
  examine_all(surroundings);
  const bool elsewhere =
      std::any_of(gathered_.hosts.begin(), gathered_.hosts.end(), [](const Host& host) { return !is_here(host); });
  if (elsewhere && !present().empty()) {
    meet();
    measure_pairs();
  }
  return std::move(ward_);
}

void Visit::leave() {
  for (std::size_t i = 0; i < gathered_.agents.size(); ++i) {
    AgentLink& agent = gathered_.agents[i];
    if (gathered_.failed[i]) agent.kill();
    agent.reap();
  }
}

/// A program that is not here is a finding, as anywhere else.
std::string program_in(const DoctorOptions& options) {
  if (options.command.empty()) return "";
  try {
    return program_of(options, options.command.front());
  } catch (const base::UsageError&) {
    return options.command.front();
  }
}

}  // namespace

int doctor(DoctorOptions options) {
  options.hosts = with_allocation(std::move(options.hosts), options.env_from, base::Env::process());
  Surroundings surroundings;
  surroundings.directory = options.directory.empty() ? "" : std::filesystem::absolute(options.directory).string();
  surroundings.here = std::filesystem::current_path();
  surroundings.environment = own_environment();
  surroundings.program = program_in(options);
  const base::Fd signals(signal_descriptor(handled_signals()));
  become_subreaper();
  Gathered gathered = gather(options, nullptr, 0ms, base::allow_files(8 * options.hosts.size() + 64), signals.get());
  Visit visit(options, std::move(gathered), signals.get());
  Ward ward = visit.run(surroundings);
  visit.leave();
  if (options.mpi)
    ward.own_mpirun = run_tool(
        {tool_path("mpirun", surroundings.environment), {"mpirun", "--version"}, surroundings.environment, "", 10s});
  const std::vector<Finding> findings = diagnose(ward);
  std::fputs((options.json ? json_of(findings) : table_of(findings)).c_str(), stdout);
  return any_bad(findings) ? 1 : 0;
}

}  // namespace lockstep::launcher
