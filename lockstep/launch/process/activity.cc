#include "lockstep/launch/process/activity.h"

#include <dirent.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <linux/sock_diag.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <memory>
#include <set>
#include <string>

#include "lockstep/base/fd.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/proc_stat.h"
#include "lockstep/base/thread.h"

namespace lockstep::launcher::process {
namespace {

using Directory = std::unique_ptr<DIR, int (*)(DIR*)>;

std::string path_of(pid_t pid, const char* file) { return "/proc/" + std::to_string(pid) + "/" + file; }

std::uint64_t file_bytes(pid_t pid) {
  std::ifstream io(path_of(pid, "io"));
  std::uint64_t bytes = 0;
  for (std::string line; std::getline(io, line);)
    for (const std::string_view name : {"rchar: ", "wchar: ", "read_bytes: ", "write_bytes: "})
      if (line.starts_with(name))
        bytes += static_cast<std::uint64_t>(base::parse_int(line.substr(name.size())).value_or(0));
  return bytes;
}

void add_sockets(pid_t pid, std::set<std::uint32_t>& inodes) {
  const std::string folder = path_of(pid, "fd");
  const Directory entries(::opendir(folder.c_str()), ::closedir);
  if (!entries) return;
  while (const dirent* entry = ::readdir(entries.get())) {
    char text[64];
    const ssize_t size = ::readlinkat(::dirfd(entries.get()), entry->d_name, text, sizeof text);
    const std::string_view link(text, size > 0 ? static_cast<std::size_t>(size) : 0);
    if (!link.starts_with("socket:[") || !link.ends_with("]")) continue;
    if (const auto inode = base::parse_int(link.substr(8, link.size() - 9)))
      inodes.insert(static_cast<std::uint32_t>(*inode));
  }
}

/// The bytes received and acknowledged on a connection, from the attributes of its message.
std::uint64_t connection_bytes(const nlmsghdr& header) {
  const auto* message = static_cast<const inet_diag_msg*>(NLMSG_DATA(&header));
  auto left = static_cast<int>(header.nlmsg_len) - static_cast<int>(NLMSG_LENGTH(sizeof *message));
  for (const auto* attribute = reinterpret_cast<const rtattr*>(message + 1); RTA_OK(attribute, left);
       attribute = RTA_NEXT(attribute, left)) {
    if (attribute->rta_type != INET_DIAG_INFO) continue;
    tcp_info info{};
    std::memcpy(&info, RTA_DATA(attribute), std::min<std::size_t>(sizeof info, RTA_PAYLOAD(attribute)));
    return info.tcpi_bytes_received + info.tcpi_bytes_acked;
  }
  return 0;
}

void add_connections(int family, std::map<std::uint32_t, std::uint64_t>& connections) {
  const base::Fd socket(::socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG));
  const timeval limit{.tv_sec = 0, .tv_usec = 200'000};
  if (!socket || ::setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) != 0) return;
  struct {
    nlmsghdr header;
    inet_diag_req_v2 request;
  } question{};
  question.header.nlmsg_len = sizeof question;
  question.header.nlmsg_type = SOCK_DIAG_BY_FAMILY;
  question.header.nlmsg_flags = NLM_F_REQUEST | NLM_F_DUMP;
  question.request.sdiag_family = static_cast<__u8>(family);
  question.request.sdiag_protocol = IPPROTO_TCP;
  question.request.idiag_ext = 1 << (INET_DIAG_INFO - 1);
  question.request.idiag_states = ~0U;
  if (::send(socket.get(), &question, sizeof question, 0) != static_cast<ssize_t>(sizeof question)) return;
  for (;;) {
    alignas(nlmsghdr) char buffer[32768];
    const ssize_t size = ::recv(socket.get(), buffer, sizeof buffer, 0);
    if (size <= 0) return;
    auto left = static_cast<unsigned>(size);
    for (const auto* header = reinterpret_cast<const nlmsghdr*>(buffer); NLMSG_OK(header, left);
         header = NLMSG_NEXT(header, left)) {
      if (header->nlmsg_type == NLMSG_DONE || header->nlmsg_type == NLMSG_ERROR) return;
      if (header->nlmsg_len < NLMSG_LENGTH(sizeof(inet_diag_msg))) continue;
      connections[static_cast<const inet_diag_msg*>(NLMSG_DATA(header))->idiag_inode] = connection_bytes(*header);
    }
  }
}

/// With that of children that have ended.
std::chrono::milliseconds all_cpu_time(const base::ProcStat& stat) { return stat.cpu_time + stat.children_cpu_time; }

/// Calls `visit` with the name of each entry of a folder that is a number.
template <typename Visit>
void for_each_number(const std::string& folder, const Visit& visit) {
  const Directory entries(::opendir(folder.c_str()), ::closedir);
  if (!entries) return;
  while (const dirent* entry = ::readdir(entries.get()))
    if (const auto number = base::parse_int(entry->d_name)) visit(static_cast<pid_t>(*number));
}

/// The CPU time of a process, `counted` a moment ago, without that of Lockstep's own threads.
std::chrono::milliseconds without_own_threads(pid_t pid, std::chrono::milliseconds counted) {
  std::chrono::milliseconds sum{0};
  const std::string folder = path_of(pid, "task/");
  for_each_number(folder, [&](pid_t thread) {
    const auto stat = base::read_proc_stat(folder + std::to_string(thread) + "/stat");
    if (stat && stat->name.starts_with(base::kOwnThreadPrefix)) sum += all_cpu_time(*stat);
  });
  if (sum.count() == 0) return counted;
  const auto process = base::read_proc_stat(pid);  // at the same time as those of the threads
  return (process ? all_cpu_time(*process) : counted) - sum;
}

}  // namespace

std::map<pid_t, ProcessCounters> read_processes() {
  std::map<pid_t, ProcessCounters> all;
  for_each_number("/proc", [&](pid_t pid) {
    if (const auto stat = base::read_proc_stat(pid)) all[pid] = {stat->parent, all_cpu_time(*stat)};
  });
  return all;
}

HostActivity read_activity() {
  HostActivity all{read_processes(), {}};
  for (const int family : {AF_INET, AF_INET6}) add_connections(family, all.connections);
  return all;
}

std::vector<pid_t> tree_of(pid_t root, const std::map<pid_t, ProcessCounters>& all) {
  std::vector<pid_t> tree = {root};
  std::set<pid_t> known = {root};  // pids that are reused while /proc is read could form a cycle
  for (std::size_t i = 0; i < tree.size(); ++i)
    for (const auto& [pid, counters] : all)
      if (counters.parent == tree[i] && known.insert(pid).second) tree.push_back(pid);
  return tree;
}

Usage usage_of_tree(pid_t root, const HostActivity& all) {
  Usage usage;
  std::set<std::uint32_t> sockets;  // processes of one tree may share them
  for (const pid_t pid : tree_of(root, all.processes)) {
    const auto found = all.processes.find(pid);
    if (found == all.processes.end()) continue;
    usage.cpu_time += without_own_threads(pid, found->second.cpu_time);
    usage.bytes += file_bytes(pid);
    add_sockets(pid, sockets);
  }
  for (const std::uint32_t inode : sockets)
    if (const auto found = all.connections.find(inode); found != all.connections.end()) usage.bytes += found->second;
  return usage;
}

bool has_worked(const Usage& before, const Usage& now, std::chrono::milliseconds elapsed) {
  const double seconds = std::chrono::duration<double>(elapsed).count();
  const double cpu = std::chrono::duration<double, std::milli>(now.cpu_time - before.cpu_time).count();
  const double bytes = now.bytes > before.bytes ? static_cast<double>(now.bytes - before.bytes) : 0;
  return seconds > 0 && (cpu >= static_cast<double>(kWorkingCpuTime.count()) * seconds ||
                         bytes >= static_cast<double>(kWorkingBytes) * seconds);
}

}  // namespace lockstep::launcher::process
