#include "lockstep/launch/hosts/pods.h"

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/net/connectivity_probe.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/timeouts.h"
#include "lockstep/job/store_client.h"
#include "lockstep/launch/hosts/start_agents.h"
#include "lockstep/launch/process/process.h"
#include "lockstep/launch/process/spawn.h"
#include "lockstep/launch/protocol/frames.h"

namespace lockstep::launcher::hosts {
namespace {

using base::Deadline;
using job::identity::Pod;
using namespace std::chrono_literals;

constexpr auto kPollInterval = 100ms;
constexpr auto kLookInterval = 500ms;
constexpr auto kStoreTimeout = 10s;
constexpr auto kEndTimeout = 2s;
constexpr const char* kStart = "start";  // then the address and the token of the launcher's listener
constexpr const char* kEnd = "end";      // then the exit code and the last line

job::Credentials credentials(const job::JobKey& key) { return {.job = "pods", .key = key}; }

Deadline store_deadline() { return Deadline::in(kStoreTimeout); }

std::string start_key(std::size_t pod) { return "starts/" + std::to_string(pod); }
std::string member_key(std::size_t pod, const std::string& start) { return std::to_string(pod) + "/" + start; }

std::string text_of(const std::vector<std::string>& command) { return base::joined(command, " "); }

/// Returns the address at which other pods reach this one. Its name may be that of a service, which is no address of an
/// interface, or an alias of a loopback address.
std::string own_address(const base::net::Address& first, Deadline deadline) {
  base::net::wait_for_name(first, deadline);
  std::string address = base::net::source_address_for(first);
  if (address.starts_with("127.") || address == "::1") address = base::net::address_of_interface("");
  return address.empty() ? "127.0.0.1" : address;
}

/// A token in characters that a text of a message may have.
std::string make_token() { return base::to_hex(base::net::ConnectivityProbe::make_token()).substr(0, 32); }

/// Connects to the listener of PodMeeting::connect_agents(). Returns an empty Fd if that fails, as when the launcher
/// has given up meanwhile, of which it then says why.
base::Fd connect_agent(const Pod& pod, const base::net::Address& launcher, const std::string& token) {
  base::net::ConnectivityProbe probe(pod.index, token);
  probe.connect_to(launcher, 0);
  const Deadline deadline = Deadline::in(base::kAgentConnectTimeout);
  while (!probe.all_decided() && !deadline.expired()) {
    std::vector<pollfd> entries = probe.entries();
    ::poll(entries.data(), entries.size(), deadline.poll_ms());
    probe.handle(entries);
  }
  probe.fail_undecided();
  auto& connection = probe.outgoing().front();
  if (connection.fd)
    base::net::allow_pauses(connection.fd.get());
  else
    base::log_warning("cannot connect to the launcher in the first pod at " + to_string(launcher) + ": " +
                      connection.error);
  return std::move(connection.fd);
}

/// Runs one agent of a pod until it has ended and no process that it started is left. Forwards signals to it.
void run_agent(base::Fd connection, int signals) {
  const pid_t agent = process::spawn({.path = "/proc/self/exe",
                                      .argv = {"lockstep", "agent", "--in-pod"},
                                      .environment = process::current_environment(),
                                      .in = connection.get(),
                                      .out = connection.get()});
  connection.reset();
  for (bool runs = true; runs;) {
    pollfd entry{signals, POLLIN, 0};
    ::poll(&entry, 1, -1);  // bounded: the agent ends when the launcher is lost, and sends SIGCHLD
    while (const auto signal = process::read_signal(signals))
      if (*signal != SIGCHLD) ::kill(agent, *signal);
    while (const auto reaped = process::try_reap()) {
      if (reaped->pid == 0) break;
      runs &= reaped->pid != agent;
    }
  }
  process::kill_descendants({}, Deadline::in(base::kUnkillableTimeout));
}

[[noreturn]] void end_by_signal(int signal) { ::_exit(128 + signal); }

/// As the first process of a container, this one would ignore the signals that it does not handle.
void let_signals_end_this() {
  for (const int signal : process::handled_signals())
    if (signal == SIGTERM || signal == SIGINT || signal == SIGQUIT || signal == SIGHUP) ::signal(signal, end_by_signal);
}

}  // namespace

PodMeeting::PodMeeting(const Pod& first, const std::vector<std::string>& command, const job::JobKey& key,
                       Deadline deadline)
    : command_(text_of(command)),
      num_pods_(static_cast<std::size_t>(first.num_pods)),
      address_(own_address(first_address(first), deadline)),
      members_(num_pods_) {
  const std::uint16_t port = first_address(first).port;
  if (!key.is_set())
    base::log_warning("the pods of this job have no key: any process that can connect to " +
                      to_string(base::net::Address{address_, port}) +
                      " can join it. Set LOCKSTEP_KEY_FILE to a file with a key, such as a mounted Secret");
  base::raise_fd_limit(job::store_fd_count(first.num_pods) + 64);
  server_.emplace(base::net::Address{address_, port}, credentials(key), first.num_pods);
}

/// Looks for a lockstep run that has started in `pod`. Returns whether there is one.
bool PodMeeting::find_member(std::size_t pod) {
  job::LocalStore& store = server_->store();
  const auto start = store.find(start_key(pod), store_deadline());
  if (!start || *start == members_[pod].start) return !members_[pod].start.empty();
  const auto said = store.find(member_key(pod, *start), store_deadline());
  if (!said) return false;
  const std::vector<std::string> words = protocol::decode_texts(*said, 2);
  if (words[1] != command_)
    throw base::UsageError("pod " + std::to_string(pod) + " (" + base::quoted(words[0], 253) + ") runs " +
                               base::quoted(words[1], 512) + ", but pod 0 runs " + base::quoted(command_, 512),
                           "start the same lockstep run in all pods of a job");
  members_[pod] = {.start = *start, .host = words[0]};
  return true;
}

void PodMeeting::tell(std::size_t pod, const std::vector<std::string>& words) {
  Member& member = members_[pod];
  server_->store().set(member_key(pod, member.start) + "/" + std::to_string(member.next++),
                       protocol::encode_texts(words), store_deadline());
}

std::vector<std::optional<PodMeeting::Agent>> PodMeeting::connect_agents(const std::vector<std::size_t>& pods,
                                                                         bool needs_all,
                                                                         std::chrono::milliseconds limit, int signals) {
  const Deadline deadline = Deadline::in(limit);
  base::net::ConnectivityProbe probe(0, make_token());
  const std::string listener = to_string(probe.listen(address_));
  std::vector<std::optional<Agent>> agents(pods.size());
  std::vector<std::string> told(pods.size());  // which start of lockstep run
  Deadline report = Deadline::in(base::kJoinReportInterval);
  for (;;) {
    std::string missing;
    for (std::size_t i = 0; i < pods.size(); ++i) {
      if (agents[i]) continue;
      if (find_member(pods[i]) && told[i] != members_[pods[i]].start) {
        tell(pods[i], {kStart, listener, probe.token()});
        told[i] = members_[pods[i]].start;
      }
      if (base::Fd connection = probe.take_incoming(static_cast<int>(pods[i]), 0, 0)) {
        base::net::allow_pauses(connection.get());
        agents[i] = {members_[pods[i]].host, std::move(connection)};
        continue;
      }
      missing += (missing.empty() ? "" : ", ") + std::to_string(pods[i]);
    }
    if (missing.empty() || (deadline.expired() && !needs_all)) return agents;
    if (deadline.expired())
      throw base::Error(base::Cause::kJoinTimeout,
                        "lockstep run has not started within " + base::seconds_text(limit) + " in pod " + missing +
                            " of " + std::to_string(num_pods_),
                        "see whether these pods run: kubectl get pods; --join-timeout waits longer");
    if (report.expired()) {
      base::log_warning("waits for pod " + missing + " of " + std::to_string(num_pods_) + ", for another " +
                        base::seconds_text(deadline.remaining()));
      report = Deadline::in(base::kJoinReportInterval);
    }
    std::vector<pollfd> entries = probe.entries();
    entries.push_back({signals, POLLIN, 0});
    ::poll(entries.data(), entries.size(), earlier(deadline, Deadline::in(kPollInterval)).poll_ms());
    if (entries.back().revents) check_interrupted(signals);
    entries.pop_back();
    probe.handle(entries);
  }
}

void PodMeeting::end(int exit_code, const std::string& last_line) {
  std::vector<std::string> waited;
  for (std::size_t pod = 1; pod < num_pods_; ++pod) {
    try {
      if (!find_member(pod)) continue;
    } catch (const base::UsageError&) {
      continue;  // it runs another command
    }
    tell(pod, {kEnd, std::to_string(exit_code), last_line});
    waited.push_back(member_key(pod, members_[pod].start) + "/ended");
  }
  const Deadline deadline = Deadline::in(kEndTimeout);
  for (const std::string& key : waited) server_->store().get(key, deadline);
}

std::vector<cli::HostSpec> hosts_of_pods(const Pod& own, int slots) {
  std::vector<cli::HostSpec> hosts;
  for (int i = 0; i < own.num_pods; ++i) {
    cli::HostSpec& host = hosts.emplace_back();
    host.is_pod = true;
    host.is_local = i == own.index;
    host.name = host.is_local ? base::net::host_name() : "pod " + std::to_string(i);
    host.slots = slots > 0 ? slots : own.ranks_per_pod;
  }
  return hosts;
}

int serve_pod(const Pod& pod, const std::vector<std::string>& command, const job::JobKey& key, Deadline deadline) {
  let_signals_end_this();
  const auto number = static_cast<std::size_t>(pod.index);
  const auto store = job::connect_store(first_address(pod), credentials(key), pod.index, deadline);
  const std::string start = std::to_string(store->add(start_key(number), 1, store_deadline()));
  const std::string member = member_key(number, start);
  store->set(member, protocol::encode_texts({base::net::host_name(), text_of(command)}), store_deadline());
  std::optional<base::Fd> signals;
  for (int next = 0;; ++next) {
    std::optional<std::string> said;
    while (!said) {  // bounded: get() throws when the launcher is lost
      said = store->get(member + "/" + std::to_string(next), Deadline::in(kLookInterval));
      if (said || !signals) continue;
      while (const auto signal = process::read_signal(signals->get()))
        if (*signal != SIGCHLD && *signal != SIGUSR1 && *signal != SIGUSR2) end_by_signal(*signal);
    }
    const std::vector<std::string> words = protocol::decode_texts(*said, 3);
    if (words[0] == kEnd) {
      if (!words[2].empty()) std::fprintf(stderr, "%s\n", words[2].c_str());
      store->set(member + "/ended", "1", store_deadline());
      return static_cast<int>(base::parse_int_in_range("the exit code of the job", words[1], 0, 255));
    }
    if (!signals) {
      signals = process::make_signal_fd(process::handled_signals());
      process::become_subreaper();
    }
    const base::net::Address launcher = base::net::parse_address("the launcher's address", words[1]);
    if (base::Fd connection = connect_agent(pod, launcher, words[2])) run_agent(std::move(connection), signals->get());
  }
}

}  // namespace lockstep::launcher::hosts
