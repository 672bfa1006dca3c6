// From what hosts have told to what is wrong with them and what to do about it: pure.
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

namespace lockstep::launcher {

enum class Severity { kOk, kWarn, kBad, kUnknown };

/// One line of the doctor's table.
struct Finding {
  std::string host;  ///< two hosts: "alpha - beta"; all of them: "all"
  std::string check;
  Severity severity = Severity::kOk;
  std::string value;   ///< what was found, printable
  std::string remedy;  ///< what to do; empty when there is nothing to do
};

/// What is known of one host.
struct HostReport {
  std::string name;          ///< as a person has named it
  std::string way;           ///< how it was reached: ssh, srun; empty: it is this one
  std::string failed, hint;  ///< why it could not be used at all; then nothing else is known, but perhaps `reached`
  bool reached = false;      ///< an agent has answered there
  std::chrono::milliseconds took{0};  ///< until it did
  std::string lost;                   ///< why it stopped answering
  HostInfo info;
  std::optional<HostFacts> facts;
  std::optional<std::chrono::nanoseconds> clock_offset;  ///< its clock's time less ours; half a round trip is taken off
  std::optional<Route> route;                            ///< how other hosts reach it
  std::string no_route;                                  ///< why there is none
};

/// Between two hosts, by their numbers.
struct LinkReport {
  std::size_t from = 0, to = 0;
  bool reaches = true;  ///< both reach each other
  LinkSpeed speed;      ///< its error says why there is none
};

struct DoctorFacts {
  std::vector<HostReport> hosts;
  std::vector<LinkReport> pairs;
  std::uint64_t model_bytes = 0;  ///< of gradients
  bool mpi = false;
  ToolResult own_mpirun;  ///< of the launcher's host, when mpi is
};

/// All findings, host by host in their order, then pairs, then the network. What hosts must have in common is compared
/// with what most of them have, of equals with the first.
std::vector<Finding> diagnose(const DoctorFacts& doctor_facts);

}  // namespace lockstep::launcher
