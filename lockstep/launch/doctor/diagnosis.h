// Turns the facts about hosts into findings with remedies. Pure.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/launch/doctor/host_facts.h"
#include "lockstep/launch/doctor/link_speed.h"
#include "lockstep/launch/plan/host_info.h"
#include "lockstep/launch/protocol/network_messages.h"

namespace lockstep::launcher::doctor {

/// The result of a check. kUnknown means that the check could not be made.
enum class Severity { kOk, kWarn, kBad, kUnknown };

/// One line of the doctor's table.
struct Finding {
  std::string host;  ///< one host, a pair of hosts ("alpha - beta"), or "all"
  std::string check;
  Severity severity = Severity::kOk;
  std::string value;   ///< the value found; printable
  std::string remedy;  ///< what the user should do; empty: nothing
};

/// The facts about one host, and how it was reached.
struct HostReport {
  std::string name;          ///< as the user named it
  std::string via;           ///< "ssh" or "srun"; empty: it is this host
  std::string failed, hint;  ///< why the host cannot be used; if set, only `reached` may be set as well
  bool reached = false;      ///< an agent on it has replied
  std::chrono::milliseconds startup_time{0};  ///< until the agent replied
  std::string lost;                           ///< why the agent stopped replying; empty: it did not stop
  plan::HostInfo info;
  std::optional<HostFacts> facts;
  std::optional<std::chrono::nanoseconds> clock_offset;  ///< its clock minus ours, corrected by half a round trip
  std::optional<protocol::Route> route;                  ///< has the address at which other hosts reach it
  std::string no_route;                                  ///< why there is no route
};

/// The link between two hosts, which are indices in DoctorFacts::hosts.
struct LinkReport {
  std::size_t from = 0, to = 0;
  bool reaches = true;  ///< each of the two reaches the other
  LinkSpeed speed;      ///< its error says why there is no measurement
};

/// All facts that the doctor has collected.
struct DoctorFacts {
  std::vector<HostReport> hosts;
  std::vector<LinkReport> links;
  std::uint64_t model_bytes = 0;   ///< bytes of gradients
  bool mpi = false;                ///< check MPI as well
  process::ToolResult own_mpirun;  ///< the output of mpirun --version on the launcher's host; only with mpi
};

/// Returns all findings: those of each host, then of the links, then of the network. If a value must be equal on all
/// hosts, each host is compared with the most frequent value; if several are equally frequent, with the first of them.
std::vector<Finding> diagnose(const DoctorFacts& doctor_facts);

}  // namespace lockstep::launcher::doctor
