#include "lockstep/launch/doctor/diagnosis.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "lockstep/base/parse.h"
#include "lockstep/launch/cli/interface_filter.h"
#include "lockstep/launch/hosts/network_check.h"

namespace lockstep::launcher::doctor {
namespace {

constexpr std::size_t kWidth = 80;

std::size_t count(const std::vector<Finding>& findings, Severity severity) {
  return static_cast<std::size_t>(
      std::ranges::count_if(findings, [&](const Finding& finding) { return finding.severity == severity; }));
}

std::string padded(std::string text, std::size_t width) {
  text.resize(std::max(text.size(), width), ' ');
  return text;
}

/// Returns `head` and `text`, wrapped between words. Lines after the first are indented by the length of `head`.
std::string wrapped(const std::string& head, const std::string& text) {
  std::string all, line = head;
  std::istringstream words(text);
  bool first = true;
  for (std::string word; words >> word; first = false) {
    if (!first && line.size() + 1 + word.size() > kWidth) {
      all += line + "\n";
      line = std::string(head.size(), ' ') + word;
    } else {
      line += (first ? "" : " ") + word;
    }
  }
  line.erase(line.find_last_not_of(' ') + 1);
  return all + line + "\n";
}

constexpr double kGigabit = 1e9 / 8;  // bytes per second

/// Classes of networks, each with the upper bound of the speed that a connection reaches on it, in Gb/s.
constexpr std::pair<double, const char*> kClasses[] = {{0.2, "a network slower than a gigabit"},
                                                       {1.5, "a gigabit network"},
                                                       {3.5, "a 2.5 Gb/s network"},
                                                       {6.5, "a 5 Gb/s network"},
                                                       {14, "a 10 Gb/s network"},
                                                       {32, "a 25 Gb/s network"},
                                                       {70, "a 50 Gb/s network"},
                                                       {150, "a 100 Gb/s network"}};

constexpr std::uint64_t kMib = std::uint64_t{1} << 20, kGib = std::uint64_t{1} << 30;
constexpr const char* kFirewallHint =
    "check for a firewall: all ports must be open between the hosts; --interface NAME, or a network such as "
    "10.0.0.0/8, selects the addresses to use";

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

Severity judge_low(std::uint64_t value, std::uint64_t bad_below, std::uint64_t warn_below) {
  return value < bad_below ? Severity::kBad : value < warn_below ? Severity::kWarn : Severity::kOk;
}

/// Returns whether `interface` connects only containers or virtual machines of its host.
bool is_virtual_interface(const std::string& interface) {
  constexpr std::array kPrefixes = {"docker", "br-", "virbr", "veth", "cni", "flannel", "cali", "podman", "lxc"};
  return std::ranges::any_of(kPrefixes, [&](const char* prefix) { return interface.starts_with(prefix); });
}

bool is_loopback(const std::string& address) { return cli::is_in_network("127.0.0.0/8", address) || address == "::1"; }

std::string list_addresses(const std::vector<base::net::InterfaceAddress>& addresses) {
  const std::string text = hosts::text_of(hosts::reachable_addresses(addresses));
  return text.empty() ? "none" : text;
}

/// Returns the numbers of the CPUs as "0-3,8".
std::string mask_text(const std::vector<plan::Cpu>& cpus) {
  std::set<int> ids;
  for (const plan::Cpu& cpu : cpus) ids.insert(cpu.id);
  std::string text;
  for (auto id = ids.begin(); id != ids.end();) {
    const int first = *id;
    int last = first;
    while (++id != ids.end() && *id == last + 1) ++last;
    text += (text.empty() ? "" : ",") + std::to_string(first) + (last > first ? "-" + std::to_string(last) : "");
  }
  return text;
}

class HostDiagnosis {
 public:
  HostDiagnosis(const HostReport& host, bool is_multi_host, std::vector<Finding>& findings)
      : host_(host), is_multi_host_(is_multi_host), findings_(findings) {}

  void run(const std::vector<Finding>& software) {
    if (!check_reached()) return;
    check_clock();
    if (host_.facts) {
      check_name();
      check_interface();
      check_cores();
      check_memory();
      check_shm();
      check_limits();
      check_huge_pages();
      findings_.insert(findings_.end(), software.begin(), software.end());
    }
    if (!host_.lost.empty())
      add("agent", Severity::kBad, host_.lost, "run lockstep doctor again; check dmesg there for out-of-memory kills");
  }

 private:
  /// Adds a finding, with the remedy unless it is kOk.
  void add(const char* check, Severity severity, std::string value, std::string remedy = {}) {
    if (severity == Severity::kOk) remedy.clear();
    findings_.push_back({host_.name, check, severity, std::move(value), std::move(remedy)});
  }

  /// Adds a finding about whether the host was reached. Returns false if no other check can be made.
  bool check_reached() {
    if (!host_.reached) {
      add("reached", Severity::kBad, host_.failed, host_.hint);
      return false;
    }
    add("reached", Severity::kOk,
        host_.via.empty()
            ? "this host"
            : "through " + host_.via + " in " + time_text(static_cast<double>(host_.startup_time.count()) / 1e3));
    if (!host_.failed.empty()) {
      add("lockstep", Severity::kBad, host_.failed, host_.hint);
      return false;
    }
    add("lockstep", Severity::kOk, host_.info.version + ", build " + host_.info.build.substr(0, 12));
    add("free port", Severity::kOk, std::to_string(host_.info.master_port) + ", chosen by the system");
    return true;
  }

  void check_clock() {
    if (!host_.clock_offset) return;
    const double clock_offset = std::chrono::duration<double>(*host_.clock_offset).count();
    const double apart = std::abs(clock_offset);
    const Severity severity = apart > 60 ? Severity::kBad : apart > 1 ? Severity::kWarn : Severity::kOk;
    add("clock", severity,
        apart < 0.05 ? "in sync"
                     : time_text(apart) + (clock_offset > 0 ? " ahead of this host's" : " behind this host's"),
        "run timedatectl set-ntp true (or chronyd) there and here: otherwise times of logs, files and certificates do "
        "not match");
  }

  /// Checks to which address the host's own name resolves, because other libraries listen on that address.
  void check_name() {
    const HostFacts& facts = *host_.facts;
    if (facts.resolved.path.empty()) return add("name", Severity::kUnknown, "there is no getent in PATH");
    if (facts.resolved.code == process::ToolResult::kTimedOut)
      return add("name", Severity::kBad, "resolving its own name took more than 10 s",
                 "add " + host_.info.host + " and its address to /etc/hosts there, or repair its DNS");
    std::vector<std::string> addresses;
    for (const std::string& line : base::split(facts.resolved.out, '\n')) {
      const std::string address = line.substr(0, line.find_first_of(" \t"));
      if (!address.empty() && std::ranges::find(addresses, address) == addresses.end()) addresses.push_back(address);
    }
    const std::string subject = host_.info.host + " resolves to ";
    if (!facts.resolved.succeeded() || addresses.empty())
      return add("name", is_multi_host_ ? Severity::kWarn : Severity::kOk, subject + "no address there",
                 "add it and its address to /etc/hosts there");
    const std::string text = base::joined(addresses);
    const auto unreachable = std::ranges::find_if(addresses, [&](const std::string& address) {
      return is_loopback(address) || is_virtual_interface(interface_of(address));
    });
    if (!is_multi_host_ || unreachable == addresses.end()) return add("name", Severity::kOk, subject + text);
    const std::string interface = is_loopback(*unreachable) ? "a loopback address" : interface_of(*unreachable);
    add("name", Severity::kWarn,
        subject + text + ", " + interface + ", which no other host can reach; its addresses are " +
            list_addresses(facts.addresses),
        "in /etc/hosts there, assign one of them to " + host_.info.host +
            ". lockstep run works without; mpirun, and torch without GLOO_SOCKET_IFNAME, do not");
  }

  void check_interface() {
    if (!is_multi_host_) return;
    const std::string candidates = list_addresses(host_.facts->addresses);
    if (!host_.route)
      return add(
          "interface", Severity::kBad,
          (host_.no_route.empty() ? "it cannot reach this host" : host_.no_route) + "; its addresses are " + candidates,
          kFirewallHint);
    const protocol::Route& route = *host_.route;
    const std::string text = route.interface + " " + route.address.host;
    if (is_virtual_interface(route.interface) || is_loopback(route.address.host))
      return add("interface", Severity::kBad, text + ", which no other host can reach; its addresses are " + candidates,
                 "select the right one with --interface NAME, or a network such as 10.0.0.0/8");
    add("interface", Severity::kOk,
        text + (candidates == route.address.host + " (" + route.interface + ")" ? "" : ", of " + candidates));
  }

  void check_cores() {
    const auto& cpus = host_.info.cpus;
    add("cores", Severity::kOk,
        std::to_string(plan::num_cores(cpus)) + " cores, mask " + mask_text(cpus) +
            (static_cast<int>(cpus.size()) < host_.facts->cpus_online
                 ? " of " + std::to_string(host_.facts->cpus_online) + " CPUs"
                 : "") +
            (host_.info.cpu_quota > 0 ? "; the quota is " + std::to_string(host_.info.cpu_quota) + " CPUs" : ""));
  }

  void check_memory() {
    const HostFacts& facts = *host_.facts;
    const bool is_low = facts.available_bytes < kGib;
    add("memory", is_low ? Severity::kWarn : Severity::kOk,
        size_text(facts.available_bytes) + " available of " + size_text(facts.memory_bytes) +
            (facts.memory_cgroup.empty() ? "" : ", limited by the control group " + facts.memory_cgroup),
        "end other programs there, or raise the memory limit of the container or job");
  }

  void check_shm() {
    const HostFacts& facts = *host_.facts;
    if (facts.shm_bytes == 0) return add("/dev/shm", Severity::kWarn, "not mounted", "mount -t tmpfs tmpfs /dev/shm");
    const std::string text = size_text(facts.shm_free_bytes) + " free of " + size_text(facts.shm_bytes);
    const Severity severity = judge_low(facts.shm_free_bytes, kMib, 128 * kMib);
    add("/dev/shm", severity,
        text + (severity == Severity::kOk                     ? ""
                : facts.shm_free_bytes < facts.shm_bytes / 10 ? ": it is full"
                                                              : ": it is small"),
        "NCCL and torch's DataLoader need it: see df -h /dev/shm; remove files of ended jobs, run mount -o "
        "remount,size=50% /dev/shm, or use docker run --ipc=host (--shm-size)");
  }

  void check_limits() {
    const HostFacts& facts = *host_.facts;
    const bool limited = facts.infiniband && facts.memlock_bytes >= 0;
    add("memlock", limited ? Severity::kWarn : Severity::kOk,
        facts.memlock_bytes < 0 ? "no limit"
                                : size_text(static_cast<std::uint64_t>(facts.memlock_bytes)) +
                                      (facts.infiniband ? ", too little for InfiniBand" : ""),
        "set LimitMEMLOCK=infinity for sshd or slurmd there, or memlock unlimited in /etc/security/limits.conf");
    add("open files", judge_low(facts.files_hard, 1024, 4096),
        std::to_string(facts.files_soft) + ", hard limit " + std::to_string(facts.files_hard),
        "raise nofile in /etc/security/limits.conf there to 65536");
  }

  void check_huge_pages() {
    const HostFacts& facts = *host_.facts;
    const std::string reserved = std::to_string(facts.huge_pages_free) + " of " + std::to_string(facts.huge_pages) +
                                 " reserved pages of " + size_text(facts.huge_page_bytes) + " free";
    add("huge pages", Severity::kOk,
        "transparent: " + (facts.transparent_huge_pages.empty() ? "unknown" : facts.transparent_huge_pages) + "; " +
            reserved);
  }

  std::string interface_of(const std::string& address) const {
    for (const base::net::InterfaceAddress& own : host_.facts->addresses)
      if (own.address == address) return own.interface;
    return "";
  }

  const HostReport& host_;
  bool is_multi_host_;
  std::vector<Finding>& findings_;
};

double bytes_per_second(const LinkSpeed& speed) {
  return static_cast<double>(speed.bytes) / (static_cast<double>(speed.ns) / 1e9);
}

void check_links(const DoctorFacts& doctor_facts, std::vector<Finding>& findings) {
  for (const LinkReport& link : doctor_facts.links) {
    const std::string hosts = doctor_facts.hosts[link.from].name + " - " + doctor_facts.hosts[link.to].name;
    if (!link.reaches)
      findings.push_back({hosts, "connect", Severity::kBad, link.speed.error, kFirewallHint});
    else if (!link.speed.error.empty())
      findings.push_back({hosts, "speed", Severity::kUnknown, link.speed.error,
                          "run lockstep doctor again: the hosts connected, but the measurement failed"});
    else if (link.speed.ns > 0)
      findings.push_back({hosts, "speed", Severity::kOk,
                          speed_text(bytes_per_second(link.speed)) + ", round trip " +
                              time_text(static_cast<double>(link.speed.round_trip_ns) / 1e9),
                          ""});
  }
}

void add_network_cost(const DoctorFacts& doctor_facts, std::vector<Finding>& findings) {
  double slowest = INFINITY, copy = INFINITY;
  for (const LinkReport& link : doctor_facts.links)
    if (link.reaches && link.speed.error.empty() && link.speed.ns > 0)
      slowest = std::min(slowest, bytes_per_second(link.speed));
  for (const HostReport& host : doctor_facts.hosts)
    if (host.facts && host.facts->copy_bytes_per_s > 0) copy = std::min(copy, host.facts->copy_bytes_per_s);
  if (std::isinf(slowest)) return;
  const bool slow = is_slow(slowest);
  findings.push_back(
      {"all", "network", slow ? Severity::kWarn : Severity::kOk,
       cost_text(doctor_facts.hosts.size(), doctor_facts.model_bytes, slowest, std::isinf(copy) ? 0 : copy),
       slow ? "use a faster network; DdpOptions.average_hosts_every = 8 sends an eighth of the bytes, "
              "DdpOptions.wire_dtype = at::kBFloat16 half; lockstep plan -- PROGRAM predicts the steps of each"
            : ""});
}

}  // namespace

const char* severity_name(Severity severity) {
  constexpr const char* kNames[] = {"ok", "warn", "bad", "unknown"};
  return kNames[static_cast<int>(severity)];
}

std::string to_table(const std::vector<Finding>& findings) {
  std::size_t host = 4, check = 5;
  for (const Finding& finding : findings) {
    host = std::max(host, std::min<std::size_t>(finding.host.size(), 20));
    check = std::max(check, finding.check.size());
  }
  std::string text;
  for (const Finding& finding : findings) {
    const std::string head = padded(finding.host, host) + "  " + padded(finding.check, check) + "  " +
                             padded(finding.severity == Severity::kBad       ? "BAD"
                                    : finding.severity == Severity::kUnknown ? "?"
                                                                             : severity_name(finding.severity),
                                    4) +
                             "  ";
    text += wrapped(head, finding.value);
    if (!finding.remedy.empty())
      text += wrapped(std::string(std::min<std::size_t>(head.size(), 24), ' ') + "-> ", finding.remedy);
  }
  return text + std::to_string(count(findings, Severity::kBad)) + " bad, " +
         std::to_string(count(findings, Severity::kWarn)) + " warnings, " +
         std::to_string(count(findings, Severity::kUnknown)) + " unknown, " +
         std::to_string(count(findings, Severity::kOk)) + " ok\n";
}

std::string to_report(const std::vector<Finding>& findings, const std::string& system,
                      const std::optional<std::string>& last_fatal) {
  return "```\n" + system + "\n" + to_table(findings) + "last failed job: " + last_fatal.value_or("none") + "\n```\n";
}

std::string to_json(const std::vector<Finding>& findings) {
  nlohmann::ordered_json all = {{"bad", count(findings, Severity::kBad)},
                                {"warn", count(findings, Severity::kWarn)},
                                {"findings", nlohmann::ordered_json::array()}};
  for (const Finding& finding : findings)
    all["findings"].push_back({{"host", finding.host},
                               {"check", finding.check},
                               {"state", severity_name(finding.severity)},
                               {"value", finding.value},
                               {"remedy", finding.remedy}});
  return all.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

bool has_bad(const std::vector<Finding>& findings) { return count(findings, Severity::kBad) > 0; }

double ring_all_reduce_seconds(std::size_t num_hosts, std::uint64_t model_bytes, double bytes_per_s) {
  if (num_hosts < 2 || bytes_per_s <= 0) return 0;
  const auto n = static_cast<double>(num_hosts);
  return 2 * (n - 1) / n * static_cast<double>(model_bytes) / bytes_per_s;
}

std::string network_class(double bytes_per_s) {
  for (const auto& [most, name] : kClasses)
    if (bytes_per_s / kGigabit <= most) return name;
  return "a network faster than 100 Gb/s";
}

bool is_slow(double bytes_per_s) { return bytes_per_s <= 1.5 * kGigabit; }

std::string speed_text(double bytes_per_s) { return number("%.3g Gb/s", bytes_per_s / kGigabit); }

std::string time_text(double seconds) {
  const double value = seconds >= 0.995 ? seconds : seconds * 1e3;
  return number(value >= 9.95 ? "%.0f" : "%.2g", value) + (seconds >= 0.995 ? " s" : " ms");
}

std::string cost_text(std::size_t num_hosts, std::uint64_t model_bytes, double bytes_per_s, double copy_bytes_per_s) {
  const double seconds = ring_all_reduce_seconds(num_hosts, model_bytes, bytes_per_s);
  const std::string on_one =
      copy_bytes_per_s > 0 ? ", " + time_text(static_cast<double>(model_bytes) / copy_bytes_per_s) + " on one host"
                           : "";
  return "this is " + network_class(bytes_per_s) + ": " + time_text(seconds) + " per step for " +
         number("%.3g MB", static_cast<double>(model_bytes) / 1e6) + " of gradients; " +
         time_text(ring_all_reduce_seconds(num_hosts, model_bytes, 10 * kGigabit)) + " at 10 Gb/s" + on_one + ", " +
         time_text(seconds / 8) + " when hosts exchange every 8 steps";
}

std::vector<Finding> diagnose(const DoctorFacts& doctor_facts) {
  std::vector<Finding> findings;
  const auto software = diagnose_software(doctor_facts);
  const bool is_multi_host = doctor_facts.hosts.size() > 1;
  if (doctor_facts.mpi && doctor_facts.own_mpirun.path.empty())
    findings.push_back({"here", "MPI", Severity::kBad, "no mpirun in PATH",
                        "install Open MPI (Debian: openmpi-bin), the same on all hosts"});
  for (std::size_t i = 0; i < doctor_facts.hosts.size(); ++i)
    HostDiagnosis(doctor_facts.hosts[i], is_multi_host, findings).run(software[i]);
  check_links(doctor_facts, findings);
  add_network_cost(doctor_facts, findings);
  return findings;
}

}  // namespace lockstep::launcher::doctor
