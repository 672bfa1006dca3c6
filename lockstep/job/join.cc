#include "lockstep/job/join.h"

#include <elf.h>
#include <link.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/net/boot_id.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/timeouts.h"
#include "lockstep/job/fatal.h"

namespace lockstep::job {
namespace {

using base::Cause;
using base::CommError;
using base::Deadline;

constexpr auto kPollInterval = std::chrono::milliseconds(200);
constexpr std::string_view kRefused = "join/refused";
constexpr std::string_view kArguments = "arguments";  // the key of the arguments, which are not a fact: they may differ

struct Member {
  std::string host;
  std::string host_id;  // distinguishes hosts with equal names
  std::string pid;
  std::vector<std::string> arguments;
  Facts facts;
};

std::string describe_member(const Member& member) { return "host " + member.host + " pid " + member.pid; }

std::string to_text(const Member& member) {
  std::string text = member.host + "\n" + member.host_id + "\n" + member.pid;
  for (std::size_t i = 0; i < member.arguments.size(); ++i)
    text += (i ? "\t" : "\n" + std::string(kArguments) + "=") + member.arguments[i];
  for (const auto& [key, value] : member.facts) text += "\n" + key + "=" + value;
  return text;
}

Member parse_member(const std::string& text) {
  Member member;
  const auto lines = base::split(text, '\n');
  if (lines.size() < 3) return member;
  member.host = lines[0];
  member.host_id = lines[1];
  member.pid = lines[2];
  for (std::size_t i = 3; i < lines.size(); ++i) {
    const std::size_t equals = lines[i].find('=');
    if (equals == std::string::npos) continue;
    const std::string key = lines[i].substr(0, equals);
    const std::string value = lines[i].substr(equals + 1);
    if (key == kArguments)
      member.arguments = base::split(value, '\t');
    else
      member.facts[key] = value;
  }
  return member;
}

std::string member_key(int rank) { return "join/" + std::to_string(rank); }

/// Registers this process as its rank. If another process has registered as the same rank, publishes an error that
/// names both processes and throws it.
void claim_rank(Store& store, const identity::Identity& id, const Member& self, Deadline deadline) {
  const std::string own_record = to_text(self);
  const std::string stored = store.compare_set(member_key(id.rank), "", own_record, deadline);
  if (stored == own_record) return;
  const std::string text = "rank " + std::to_string(id.rank) + " joined twice: from " +
                           describe_member(parse_member(stored)) + " and from " + describe_member(self);
  store.set(kRefused, text, deadline);
  throw base::UsageError(
      text, "give each process its own rank: with n processes per node, RANK on node k is k * n + LOCAL_RANK");
}

/// Throws the error that another rank has published, if there is one: that rank will not join.
void throw_if_job_failed(Store& store, const identity::Identity& id, Deadline deadline) {
  if (const auto refused = store.find(kRefused, deadline)) throw base::UsageError(*refused);
  const auto line = store.find(key::kCause, deadline);
  const auto cause = line ? parse_fatal(*line) : std::nullopt;
  if (cause) throw CommError(cause->cause, "init", id.rank, cause->rank, cause->detail, cause->hint);
}

/// Says which ranks have not joined yet.
void report_missing(Store& store, const identity::Identity& id, Deadline deadline) {
  std::vector<int> missing;
  for (int rank = 0; rank < id.world_size; ++rank)
    if (!store.find(member_key(rank), deadline)) missing.push_back(rank);
  base::log_warning("init() waits for " + std::to_string(missing.size()) + " of " + std::to_string(id.world_size) +
                    " ranks at " + to_string(id.address) + ", for at most " + base::seconds_text(deadline.remaining()) +
                    " more: " + base::joined(missing));
}

std::vector<Member> wait_for_members(Store& store, const identity::Identity& id, Deadline deadline) {
  std::vector<Member> members(static_cast<std::size_t>(id.world_size));
  Deadline report = Deadline::in(base::kJoinReportInterval);
  for (int rank = 0; rank < id.world_size; ++rank) {
    std::optional<std::string> text;
    while (!(text = store.get(member_key(rank), earlier(deadline, Deadline::in(kPollInterval))))) {
      throw_if_job_failed(store, id, deadline);
      if (deadline.expired()) break;
      if (id.rank != 0 || !report.expired()) continue;
      report_missing(store, id, deadline);
      report = Deadline::in(base::kJoinReportInterval);
    }
    if (text) members[static_cast<std::size_t>(rank)] = parse_member(*text);
  }
  if (const auto refused = store.find(kRefused, deadline)) throw base::UsageError(*refused);
  std::vector<int> missing;
  for (int rank = 0; rank < id.world_size; ++rank)
    if (members[static_cast<std::size_t>(rank)].host.empty()) missing.push_back(rank);
  if (!missing.empty())
    throw CommError(Cause::kJoinTimeout, "init", id.rank, -1,
                    std::to_string(missing.size()) + " of " + std::to_string(id.world_size) +
                        " ranks did not join in time: " + base::joined(missing),
                    "check that they were started with this address (" + to_string(id.address) + ") and world size");
  return members;
}

void compare_facts(const std::vector<Member>& members, const identity::Identity& id) {
  for (std::size_t rank = 1; rank < members.size(); ++rank)
    for (const auto& [key, value] : members[0].facts) {
      const auto found = members[rank].facts.find(key);
      const std::string theirs = found == members[rank].facts.end() ? "-" : found->second;
      if (theirs != value)
        throw CommError(Cause::kConfigMismatch, "init", id.rank, static_cast<int>(rank),
                        "rank " + std::to_string(rank) + " differs from rank 0 in " + key + ": " +
                            base::quoted(theirs, 128) + " on " + members[rank].host + ", but " +
                            base::quoted(value, 128) + " on " + members[0].host,
                        "start the same program with the same libraries on every rank");
    }
}

/// Warns about arguments that differ from those of rank 0. Rank 0 logs the first rank that differs; every other rank
/// logs only its own difference. This is only a warning, because the difference may be intended.
void warn_about_arguments(const std::vector<Member>& members, const identity::Identity& id) {
  for (std::size_t rank = id.rank == 0 ? 1 : static_cast<std::size_t>(id.rank); rank < members.size(); ++rank) {
    const std::string difference = argument_difference(members[rank].arguments, members[0].arguments);
    if (!difference.empty())
      return base::log_warning("rank " + std::to_string(rank) +
                               " was started with different arguments than rank 0: " + difference);
    if (id.rank != 0) return;
  }
}

void fill_host_layout(const std::vector<Member>& members, identity::Identity& id) {
  const auto self = static_cast<std::size_t>(id.rank);
  std::vector<std::string> hosts;
  int num_before = 0;
  int num_local = 0;
  int node = 0;
  for (std::size_t rank = 0; rank < members.size(); ++rank) {
    const std::string host = members[rank].host + members[rank].host_id;
    const auto known = std::ranges::find(hosts, host);
    id.host_indices.push_back(static_cast<int>(known - hosts.begin()));
    if (known == hosts.end()) hosts.push_back(host);
    if (host != members[self].host + members[self].host_id) continue;
    node = id.host_indices.back();
    id.local_ranks.push_back(static_cast<int>(rank));
    num_before += rank < self;
    ++num_local;
  }
  if (id.local_rank < 0) id.local_rank = num_before;
  if (id.local_world_size < 0) id.local_world_size = num_local;
  if (id.node_rank < 0) id.node_rank = node;
  if (id.num_nodes < 0) id.num_nodes = static_cast<int>(hosts.size());
}

/// Finds the build id among the notes of an ELF image. A note consists of the size of its name, the size of its
/// description and its type (4 bytes each), then the name and the description, each padded to 4 bytes.
std::string build_id_of(const dl_phdr_info& image) {
  for (int i = 0; i < image.dlpi_phnum; ++i) {
    const ElfW(Phdr) & header = image.dlpi_phdr[i];
    if (header.p_type != PT_NOTE) continue;
    const auto* at = reinterpret_cast<const char*>(image.dlpi_addr + header.p_vaddr);
    const char* end = at + header.p_memsz;
    while (at + sizeof(ElfW(Nhdr)) <= end) {
      ElfW(Nhdr) note;
      std::memcpy(&note, at, sizeof note);
      const char* text = at + sizeof note + (note.n_namesz + 3) / 4 * 4;
      if (note.n_type == NT_GNU_BUILD_ID && text + note.n_descsz <= end) return base::to_hex({text, note.n_descsz});
      at = text + (note.n_descsz + 3) / 4 * 4;
    }
  }
  return "-";
}

constexpr std::size_t kMaxArguments = 64;
constexpr std::size_t kMaxArgumentBytes = 100;

std::string quote_around(const std::vector<std::string>& arguments, std::size_t at) {
  std::string text;
  for (std::size_t i = at ? at - 1 : 0; i < arguments.size() && i < at + 2; ++i)
    text += (text.empty() ? "" : " ") + base::quoted(arguments[i], kMaxArgumentBytes);
  return text.empty() ? "none" : text;
}

}  // namespace

std::vector<std::string> own_arguments() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  std::vector<std::string> words = base::split(text, '\0');
  words.pop_back();  // the empty text after the last zero byte
  return words;
}

std::vector<std::string> comparable_arguments(std::vector<std::string> command_line) {
  std::vector<std::string> kept;
  for (std::size_t i = 1; i < command_line.size() && kept.size() < kMaxArguments; ++i) {
    std::string& word = command_line[i];
    if (word.find("rank") != std::string::npos) {
      i += word.find('=') == std::string::npos;
      continue;
    }
    word.resize(std::min(word.size(), kMaxArgumentBytes));
    std::ranges::replace_if(word, [](unsigned char c) { return c < 0x20; }, ' ');
    kept.push_back(std::move(word));
  }
  return kept;
}

std::string argument_difference(const std::vector<std::string>& theirs, const std::vector<std::string>& first) {
  const auto [a, b] = std::mismatch(theirs.begin(), theirs.end(), first.begin(), first.end());
  if (a == theirs.end() && b == first.end()) return "";
  const auto at = static_cast<std::size_t>(a - theirs.begin());
  return quote_around(theirs, at) + " instead of " + quote_around(first, at);
}

void join(Store& store, identity::Identity& identity, const Facts& facts, Deadline deadline) {
  const std::string host = base::net::host_name();
  Member self{.host = host,
              .host_id = host_id(),
              .pid = std::to_string(::getpid()),
              .arguments = comparable_arguments(own_arguments()),
              .facts = facts};
  self.facts["world_size"] = std::to_string(identity.world_size);
  claim_rank(store, identity, self, deadline);
  const std::vector<Member> members = wait_for_members(store, identity, deadline);
  compare_facts(members, identity);
  warn_about_arguments(members, identity);
  fill_host_layout(members, identity);
}

std::string host_id() {
  std::string id = base::net::boot_id() + " " + std::to_string(::geteuid());
  for (const char* space : {"/proc/self/ns/net", "/proc/self/ns/user"}) {
    char text[64];
    const ssize_t size = ::readlink(space, text, sizeof text);
    if (size > 0) id += " " + std::string(text, static_cast<std::size_t>(size));
  }
  struct stat folder{};  // containers in the network of their host have one of their own
  if (::stat("/tmp", &folder) == 0) id += " " + std::to_string(folder.st_dev) + ":" + std::to_string(folder.st_ino);
  if (const auto& name = base::Env::this_process().lockstep_host_id) id += " " + base::quoted(*name, 200);
  return id;
}

std::string find_host_of_rank(Store& store, int rank) {
  const auto member = store.find(member_key(rank), Deadline::in(kPollInterval));
  return member ? parse_member(*member).host : "?";
}

std::string build_id(const std::string& library) {
  struct Search {
    const std::string& library;
    std::string id = "-";
  } search{library};
  ::dl_iterate_phdr(
      [](dl_phdr_info* image, std::size_t, void* data) {
        auto& request = *static_cast<Search*>(data);
        const std::string_view path = image->dlpi_name;
        // The main program is the first image.
        if (!request.library.empty() && path.substr(path.rfind('/') + 1) != request.library) return 0;
        request.id = build_id_of(*image);
        return 1;
      },
      &search);
  return search.id;
}

}  // namespace lockstep::job
