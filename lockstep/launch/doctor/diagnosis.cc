#include "lockstep/launch/doctor/diagnosis.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <set>

#include "lockstep/base/parse.h"
#include "lockstep/launch/cli/interface_filter.h"
#include "lockstep/launch/doctor/network_cost.h"
#include "lockstep/launch/doctor/software_diagnosis.h"

namespace lockstep::launcher {
namespace {

using namespace std::chrono_literals;

constexpr std::uint64_t kMib = std::uint64_t{1} << 20, kGib = std::uint64_t{1} << 30;
constexpr const char* kFirewall =
    "does a firewall forbid it? Any port must be open between the hosts; --interface NAME, or a network such as "
    "10.0.0.0/8, says which addresses are meant";

std::string number(const char* form, double value) {
  char text[64];
  std::snprintf(text, sizeof text, form, value);
  return text;
}

std::string size_text(std::uint64_t bytes) {
  return bytes >= kGib   ? number("%.1f GiB", static_cast<double>(bytes) / static_cast<double>(kGib))
         : bytes >= kMib ? number("%.0f MiB", static_cast<double>(bytes) / static_cast<double>(kMib))
                         : std::to_string(bytes >> 10) + " KiB";
}

/// Interfaces that lead to containers and virtual machines of this host, and nowhere else.
bool is_inner(const std::string& interface) {
  constexpr std::array kPrefixes = {"docker", "br-", "virbr", "veth", "cni", "flannel", "cali", "podman", "lxc"};
  return std::any_of(kPrefixes.begin(), kPrefixes.end(),
                     [&](const char* prefix) { return interface.rfind(prefix, 0) == 0; });
}

bool is_loopback(const std::string& address) { return is_in_network("127.0.0.0/8", address) || address == "::1"; }

std::string candidates_of(const std::vector<base::InterfaceAddress>& addresses) {
  std::string text;
  for (const base::InterfaceAddress& one : addresses)
    if (!one.loopback && one.address.find('%') == std::string::npos)
      text += (text.empty() ? "" : ", ") + one.address + " (" + one.interface + ")";
  return text.empty() ? "none" : text;
}

/// "0-3,8" of the CPUs' numbers.
std::string mask_text(const std::vector<Cpu>& cpus) {
  std::set<int> ids;
  for (const Cpu& cpu : cpus) ids.insert(cpu.id);
  std::string text;
  for (auto one = ids.begin(); one != ids.end();) {
    const int first = *one;
    int last = first;
    while (++one != ids.end() && *one == last + 1) ++last;
    text += (text.empty() ? "" : ",") + std::to_string(first) + (last > first ? "-" + std::to_string(last) : "");
  }
  return text;
}

class HostDiagnosis {
 public:
  HostDiagnosis(const PatientFile& host, bool several, std::vector<Finding>& findings)
      : host_(host), several_(several), findings_(findings) {}

  void run(const std::vector<Finding>& software) {
    if (!look_whether_reached()) return;
    look_at_clock();
    if (host_.found) {
      look_at_name();
      look_at_interface();
      look_at_cores();
      look_at_memory();
      look_at_shm();
      look_at_limits();
      look_at_huge_pages();
      findings_.insert(findings_.end(), software.begin(), software.end());
    }
    if (!host_.lost.empty())
      add("agent", State::kBad, host_.lost,
          "did something end its processes? Ask again; dmesg there tells of memory that ran out");
  }

 private:
  void add(const char* check, State state, std::string value, std::string remedy = {}) {
    findings_.push_back({host_.name, check, state, std::move(value), std::move(remedy)});
  }

  /// False when there is nothing more to say.
  bool look_whether_reached() {
    if (!host_.reached) {
      add("reached", State::kBad, host_.failed, host_.hint);
      return false;
    }
    add("reached", State::kOk,
        host_.way.empty() ? "it is this one"
                          : "by " + host_.way + " in " + time_text(static_cast<double>(host_.took.count()) / 1e3));
    if (!host_.failed.empty()) {
      add("lockstep", State::kBad, host_.failed, host_.hint);
      return false;
    }
    add("lockstep", State::kOk, host_.site.version + ", build " + host_.site.build.substr(0, 12));
    add("free port", State::kOk, std::to_string(host_.site.master_port) + ", of those that the system gives");
    return true;
  }

  void look_at_clock() {
    if (!host_.ahead) return;
    const double ahead = std::chrono::duration<double>(*host_.ahead).count(), apart = std::abs(ahead);
    const State state = apart > 60 ? State::kBad : apart > 1 ? State::kWarn : State::kOk;
    add("clock", state,
        apart < 0.05 ? "as here" : time_text(apart) + (ahead > 0 ? " ahead of this host's" : " behind this host's"),
        state == State::kOk ? ""
                            : "timedatectl set-ntp true there (or chronyd), and here: logs, files' times and "
                              "certificates mix otherwise");
  }

  /// Libraries of others listen where their host's name leads.
  void look_at_name() {
    const Examination& found = *host_.found;
    if (found.resolved.path.empty()) return add("name", State::kUnknown, "there is no getent to ask with");
    if (found.resolved.code == ToolSaid::kNoEnd)
      return add("name", State::kBad, "resolving its own name took more than 10 s",
                 "put " + host_.site.host + " and its address into /etc/hosts there, or mend its DNS");
    std::vector<std::string> leads;
    for (const std::string& line : base::split(found.resolved.out, '\n')) {
      const std::string address = line.substr(0, line.find_first_of(" \t"));
      if (!address.empty() && std::find(leads.begin(), leads.end(), address) == leads.end()) leads.push_back(address);
    }
    const std::string who = host_.site.host + " is ";
    if (!found.resolved.good() || leads.empty())
      return add("name", several_ ? State::kWarn : State::kOk, who + "not known there",
                 several_ ? "put it and its address into /etc/hosts there" : "");
    std::string text;
    for (const std::string& one : leads) text += (text.empty() ? "" : ", ") + one;
    const auto wrong = std::find_if(leads.begin(), leads.end(), [&](const std::string& one) {
      return is_loopback(one) || is_inner(interface_with(one));
    });
    if (!several_ || wrong == leads.end()) return add("name", State::kOk, who + text);
    const std::string interface = is_loopback(*wrong) ? "a loopback" : interface_with(*wrong);
    add("name", State::kWarn,
        who + text + ", " + interface + ", which no other host reaches; its addresses are " +
            candidates_of(found.addresses),
        "in /etc/hosts there, put " + host_.site.host +
            " behind one of them. lockstep run goes round it; mpirun, and torch without GLOO_SOCKET_IFNAME, do not");
  }

  void look_at_interface() {
    if (!several_) return;
    const std::string candidates = candidates_of(host_.found->addresses);
    if (!host_.door)
      return add(
          "interface", State::kBad,
          (host_.no_door.empty() ? "it does not reach this host" : host_.no_door) + "; its addresses are " + candidates,
          kFirewall);
    const Door& door = *host_.door;
    const std::string text = door.interface + " " + door.address.host;
    if (is_inner(door.interface) || is_loopback(door.address.host))
      return add("interface", State::kBad, text + ", which no other host reaches; its addresses are " + candidates,
                 "--interface NAME, or a network such as 10.0.0.0/8, names the right one");
    add("interface", State::kOk,
        text + (candidates == door.address.host + " (" + door.interface + ")" ? "" : ", of " + candidates));
  }

  void look_at_cores() {
    const auto& cpus = host_.site.cpus;
    add("cores", State::kOk,
        std::to_string(num_cores(cpus)) + " cores, mask " + mask_text(cpus) +
            (static_cast<int>(cpus.size()) < host_.found->cpus_online
                 ? " of " + std::to_string(host_.found->cpus_online) + " CPUs"
                 : ""));
  }

  void look_at_memory() {
    const Examination& found = *host_.found;
    const bool little = found.available_bytes < kGib;
    add("memory", little ? State::kWarn : State::kOk,
        size_text(found.available_bytes) + " available of " + size_text(found.memory_bytes) +
            (found.limited_by == "the host" || found.limited_by.empty() ? "" : ", limited by " + found.limited_by),
        little ? "end what uses it there, or raise the limit of its container or job" : "");
  }

  void look_at_shm() {
    const Examination& found = *host_.found;
    const std::string remedy =
        "NCCL and torch's DataLoader need it: df -h /dev/shm; remove what is left of ended jobs, mount -o "
        "remount,size=50% /dev/shm, or docker run --ipc=host (--shm-size)";
    if (found.shm_bytes == 0) return add("/dev/shm", State::kWarn, "there is none", "mount -t tmpfs tmpfs /dev/shm");
    const std::string text = size_text(found.shm_free_bytes) + " free of " + size_text(found.shm_bytes);
    const State state = found.shm_free_bytes < kMib         ? State::kBad
                        : found.shm_free_bytes < 128 * kMib ? State::kWarn
                                                            : State::kOk;
    add("/dev/shm", state,
        text + (state == State::kOk                           ? ""
                : found.shm_free_bytes < found.shm_bytes / 10 ? ": it is full"
                                                              : ": it is small"),
        state == State::kOk ? "" : remedy);
  }

  void look_at_limits() {
    const Examination& found = *host_.found;
    const bool limited = found.infiniband && found.memlock_bytes >= 0;
    add("memlock", limited ? State::kWarn : State::kOk,
        found.memlock_bytes < 0 ? "no limit"
                                : size_text(static_cast<std::uint64_t>(found.memlock_bytes)) +
                                      (found.infiniband ? ", too little for InfiniBand" : ""),
        limited ? "LimitMEMLOCK=infinity for sshd or slurmd there, or memlock unlimited in /etc/security/limits.conf"
                : "");
    const State state = found.files_hard < 1024 ? State::kBad : found.files_hard < 4096 ? State::kWarn : State::kOk;
    add("open files", state, std::to_string(found.files_soft) + ", at most " + std::to_string(found.files_hard),
        state == State::kOk ? "" : "raise nofile in /etc/security/limits.conf there to 65536");
  }

  void look_at_huge_pages() {
    const Examination& found = *host_.found;
    const std::string reserved = std::to_string(found.huge_pages_free) + " of " + std::to_string(found.huge_pages) +
                                 " reserved ones of " + size_text(found.huge_page_bytes) + " free";
    add("huge pages", State::kOk,
        "transparent: " + (found.transparent_huge_pages.empty() ? "not known" : found.transparent_huge_pages) + "; " +
            reserved);
  }

  std::string interface_with(const std::string& address) const {
    for (const base::InterfaceAddress& one : host_.found->addresses)
      if (one.address == address) return one.interface;
    return "";
  }

  const PatientFile& host_;
  bool several_;
  std::vector<Finding>& findings_;
};

double speed_of(const PairSpeed& speed) {
  return static_cast<double>(speed.bytes) / (static_cast<double>(speed.ns) / 1e9);
}

void look_at_pairs(const Ward& ward, std::vector<Finding>& findings) {
  for (const PairFile& pair : ward.pairs) {
    const std::string who = ward.hosts[pair.from].name + " - " + ward.hosts[pair.to].name;
    if (!pair.reaches)
      findings.push_back({who, "connect", State::kBad, pair.speed.error, kFirewall});
    else if (!pair.speed.error.empty())
      findings.push_back({who, "speed", State::kUnknown, pair.speed.error,
                          "ask again: the connection came about, but not the measurement"});
    else if (pair.speed.ns > 0)
      findings.push_back({who, "speed", State::kOk,
                          speed_text(speed_of(pair.speed)) + ", round trip " +
                              time_text(static_cast<double>(pair.speed.round_trip_ns) / 1e9),
                          ""});
  }
}

void look_at_network(const Ward& ward, std::vector<Finding>& findings) {
  double slowest = INFINITY, copy = INFINITY;
  for (const PairFile& pair : ward.pairs)
    if (pair.reaches && pair.speed.error.empty() && pair.speed.ns > 0)
      slowest = std::min(slowest, speed_of(pair.speed));
  for (const PatientFile& host : ward.hosts)
    if (host.found && host.found->copy_bytes_per_s > 0) copy = std::min(copy, host.found->copy_bytes_per_s);
  if (std::isinf(slowest)) return;
  const bool slow = is_slow(slowest);
  findings.push_back(
      {"all", "network", slow ? State::kWarn : State::kOk,
       cost_text(ward.hosts.size(), ward.model_bytes, slowest, std::isinf(copy) ? 0 : copy),
       slow ? "a faster network; DdpOptions.host_sync_every = 8 sends an eighth, DdpOptions.wire = at::kBFloat16 half"
            : ""});
}

}  // namespace

std::vector<Finding> diagnose(const Ward& ward) {
  std::vector<Finding> findings;
  const auto software = diagnose_software(ward);
  const bool several = ward.hosts.size() > 1;
  if (ward.mpi && ward.own_mpirun.path.empty())
    findings.push_back({"here", "MPI", State::kBad, "no mpirun in PATH",
                        "install Open MPI (Debian: openmpi-bin), the same on all hosts"});
  for (std::size_t i = 0; i < ward.hosts.size(); ++i) HostDiagnosis(ward.hosts[i], several, findings).run(software[i]);
  look_at_pairs(ward, findings);
  look_at_network(ward, findings);
  return findings;
}

}  // namespace lockstep::launcher
