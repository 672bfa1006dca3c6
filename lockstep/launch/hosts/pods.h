// One job of the `lockstep run` in each of several pods (job/identity/pod.h). The one in the first pod is the launcher;
// the others start agents that connect to it, and end with its exit code. They meet in a store that the launcher
// serves at the address of the first pod:
//   starts/POD              how many times lockstep run has started in the pod
//   POD/START               the pod's host name and command line
//   POD/START/N             what it must do next: start an agent, or end
//   POD/START/ended         it has read that it must end
#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/fd.h"
#include "lockstep/base/net/socket.h"
#include "lockstep/job/identity/pod.h"
#include "lockstep/job/job_key.h"
#include "lockstep/job/store_server.h"
#include "lockstep/launch/cli/host_list.h"

namespace lockstep::launcher::hosts {

/// The launcher's side. Not thread-safe.
class PodMeeting {
 public:
  struct Agent {
    std::string host;     ///< name of its pod
    base::Fd connection;  ///< its stdin and stdout
  };

  /// Serves the store. `first` is this pod. Without a key, prints a warning. Throws SystemError, with kPortInUse if the
  /// port is taken, and UsageError if the pod's name cannot be resolved before `deadline`.
  PodMeeting(const job::identity::Pod& first, const std::vector<std::string>& command, const job::JobKey& key,
             base::Deadline deadline);

  /// Starts agents in the pods with the numbers `pods`, which are not this one. Blocks until all are connected, for at
  /// most `limit`, and prints every 30 s which pods are missing. With `needs_all`, throws Error kJoinTimeout if some
  /// are; otherwise these have no agent in the result. Throws UsageError if a pod runs another command, and what
  /// check_interrupted() throws.
  std::vector<std::optional<Agent>> connect_agents(const std::vector<std::size_t>& pods, bool needs_all,
                                                   std::chrono::milliseconds limit, int signals);

  /// Lets all pods end with `exit_code` after printing `last_line`, unless it is empty. Blocks until they know, for at
  /// most 2 s.
  void end(int exit_code, const std::string& last_line);

 private:
  struct Member {
    std::string start;   // of its present lockstep run; empty: none
    int next = 0;        // N of the next key
    std::string host{};  // its name
  };

  bool find_member(std::size_t pod);
  void tell(std::size_t pod, const std::vector<std::string>& words);

  const std::string command_;
  const std::size_t num_pods_;
  std::string address_;  // numeric, of this pod
  std::optional<job::StoreServer> server_;
  std::vector<Member> members_;  // one per pod
};

/// Returns a host for each pod, with `slots` slots, or else the number that the variables of `own` ask for.
std::vector<cli::HostSpec> hosts_of_pods(const job::identity::Pod& own, int slots);

/// Runs the agents of this pod, which is not the first, until the launcher ends the job. Blocks until the first pod
/// answers, at most until `deadline`. A signal that ends or stops a job is forwarded to the launcher as soon as there
/// is an agent; before, it ends this process. Returns the exit code of the job. Throws CommError if the launcher is
/// lost.
int serve_pod(const job::identity::Pod& pod, const std::vector<std::string>& command, const job::JobKey& key,
              base::Deadline deadline);

}  // namespace lockstep::launcher::hosts
