// Turns the facts about hosts into findings with remedies, and these into a table or JSON. Pure.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/launch/doctor/host_facts.h"
#include "lockstep/launch/doctor/link_speed.h"
#include "lockstep/launch/plan/host_info.h"
#include "lockstep/launch/protocol/network_messages.h"

namespace lockstep::launcher::doctor {

/// Returns the seconds in which `num_hosts` hosts reduce `model_bytes` by a ring all-reduce: 2 (n - 1) / n * bytes /
/// bytes_per_s for n hosts, if no link is shared and nothing overlaps (Patarasuk and Yuan, "Bandwidth optimal
/// all-reduce algorithms for clusters of workstations", 2009). Returns 0 for one host.
double ring_all_reduce_seconds(std::size_t num_hosts, std::uint64_t model_bytes, double bytes_per_s);

/// Returns the class of a network by the speed of one connection, such as "a gigabit network".
std::string network_class(double bytes_per_s);
/// Returns whether communication dominates a training step on such a network: whether it has 1.5 Gb/s or less.
bool is_slow(double bytes_per_s);

/// Returns "0.94 Gb/s".
std::string speed_text(double bytes_per_s);
/// Returns "1.2 s", "35 ms" or "0.21 ms".
std::string time_text(double seconds);

/// Returns "this is a gigabit network: N s per step for 250 MB of gradients; M s at 10 Gb/s, K s on one host, J s when
/// hosts exchange every 8 steps". N is ring_all_reduce_seconds() at `bytes_per_s`, the speed of the slowest link, and M
/// the same at 1.25e9 bytes/s. J is N / 8, as with average_hosts_every = 8. K is model_bytes / copy_bytes_per_s,
/// because in shared memory each rank reads and writes that many bytes in all; `copy_bytes_per_s` is the measured speed
/// at which a core of the slowest host copies memory. If it is 0, K is left out.
std::string cost_text(std::size_t num_hosts, std::uint64_t model_bytes, double bytes_per_s, double copy_bytes_per_s);

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

/// Returns "ok", "warn", "bad" or "unknown".
const char* severity_name(Severity severity);

/// Returns a table with one line per finding. Each remedy is below its finding, after "->"; the last line has the
/// counts. Lines have at most 80 columns unless a word is longer.
std::string to_table(const std::vector<Finding>& findings);

/// Returns one JSON object and a newline: {"bad": N, "warn": N, "findings": [{"host", "check", "state", "value",
/// "remedy"}]}.
std::string to_json(const std::vector<Finding>& findings);

/// Returns a block of Markdown: `system`, the table, and the FATAL line of the last failed job, or that there is none.
std::string to_report(const std::vector<Finding>& findings, const std::string& system,
                      const std::optional<std::string>& last_fatal);

/// Returns whether a finding is kBad.
bool has_bad(const std::vector<Finding>& findings);

/// The versions of software on one host, parsed from the output of tools.
struct Software {
  std::string libtorch, libtorch_cuda, probe_nccl;    ///< from lockstep-probe; empty: unknown, or none
  std::string python, torch, torch_cuda, torch_nccl;  ///< from the program's Python interpreter
  std::string python_error, python_prefix;
  std::string active_environment;               ///< VIRTUAL_ENV or CONDA_PREFIX, if Python is not that one's
  std::string no_cuda;                          ///< why torch.cuda.is_available() is false
  std::map<std::string, std::string> packages;  ///< versions of those that the script imports; empty: missing
  std::vector<std::string> missing;             ///< libraries of the program that were not found
  int num_libraries = 0;                        ///< number of libraries that were found
  std::string program_libtorch;                 ///< path of the libtorch that the program loads
  struct Gpu {
    std::string name, driver;
    std::uint64_t mib = 0;
  };
  std::vector<Gpu> gpus;
  std::string open_mpi;  ///< version, such as "4.1.4"
};

/// Parses the output of the tools. What cannot be parsed stays empty.
Software parse_software(const HostFacts& facts);

/// Returns the major version of the oldest driver that runs programs for this CUDA version ("12.8"); 0 if unknown. The
/// source is the table of minor version compatibility in NVIDIA's "CUDA Compatibility".
int min_driver_for(const std::string& cuda);

/// Returns the version in a text, such as "4.1.4" in "mpirun (Open MPI) 4.1.4"; empty if there is none.
std::string find_version(const std::string& text);

/// Returns the findings about the software of each host. result[i] belongs to doctor_facts.hosts[i].
std::vector<std::vector<Finding>> diagnose_software(const DoctorFacts& doctor_facts);

}  // namespace lockstep::launcher::doctor
