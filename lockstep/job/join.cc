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
constexpr auto kPollIntervalPerRank = std::chrono::milliseconds(1);
constexpr std::string_view kRefused = "join/refused";
constexpr std::string_view kRoster = "join/roster";   // a Roster
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

/// Waits for the value of `key`, and throws when the job has failed: within 200 ms, or 1 ms per rank of a large job. If
/// all ranks of that asked as often, the store would have no time for others. Returns nothing at the deadline.
std::optional<std::string> wait_for(Store& store, const std::string& key, const identity::Identity& id,
                                    Deadline deadline, Deadline& report) {
  const auto interval = std::max<std::chrono::milliseconds>(kPollInterval, kPollIntervalPerRank * id.world_size);
  std::optional<std::string> text;
  while (!(text = store.get(key, earlier(deadline, Deadline::in(interval))))) {
    throw_if_job_failed(store, id, deadline);
    if (deadline.expired()) break;
    if (id.rank != 0 || !report.expired()) continue;
    report_missing(store, id, deadline);
    report = Deadline::in(base::kJoinReportInterval);
  }
  return text;
}

[[noreturn]] void throw_missing(Store& store, const identity::Identity& id) {
  std::vector<int> missing;
  for (int rank = 0; rank < id.world_size; ++rank)
    if (!store.find(member_key(rank), Deadline::in(kPollInterval))) missing.push_back(rank);
  if (missing.empty())
    throw CommError(Cause::kJoinTimeout, "init", id.rank, 0,
                    "all ranks have joined, but rank 0 has not said so in time: it has stopped, or is slow",
                    "look at rank 0 for the cause");
  throw CommError(Cause::kJoinTimeout, "init", id.rank, -1,
                  std::to_string(missing.size()) + " of " + std::to_string(id.world_size) +
                      " ranks did not join in time: " + base::joined(missing),
                  "check that they were started with this address (" + to_string(id.address) + ") and world size");
}

void compare_facts(const Member& first, const Member& member, int rank, const identity::Identity& id) {
  for (const auto& [key, value] : first.facts) {
    const auto found = member.facts.find(key);
    const std::string theirs = found == member.facts.end() ? "-" : found->second;
    if (theirs != value)
      throw CommError(Cause::kConfigMismatch, "init", id.rank, rank,
                      "rank " + std::to_string(rank) + " differs from rank 0 in " + key + ": " +
                          base::quoted(theirs, 128) + " on " + member.host + ", but " + base::quoted(value, 128) +
                          " on " + first.host,
                      "start the same program with the same libraries on every rank");
  }
}

/// Warns about arguments that differ from those of rank 0. This is only a warning, because the difference may be
/// intended. Returns whether they differ.
bool warn_about_arguments(const Member& first, const Member& member, int rank) {
  const std::string difference = argument_difference(member.arguments, first.arguments);
  if (!difference.empty())
    base::log_warning("rank " + std::to_string(rank) +
                      " was started with different arguments than rank 0: " + difference);
  return !difference.empty();
}

/// The roster is what rank 0 has found in the records of all ranks, so that the others need not read them: for each
/// rank the number of its host, in the order of the hosts' first ranks. As text "0*8,1*8": runs of equal numbers.
std::string to_text(const std::vector<int>& host_indices) {
  std::string text;
  for (std::size_t first = 0, end = 0; first < host_indices.size(); first = end) {
    while (end < host_indices.size() && host_indices[end] == host_indices[first]) ++end;
    text += (first ? "," : "") + std::to_string(host_indices[first]) + "*" + std::to_string(end - first);
  }
  return text;
}

std::vector<int> parse_roster(const std::string& text, int world_size) {
  std::vector<int> host_indices;
  for (const std::string& run : base::split(text, ',')) {
    const std::size_t star = std::min(run.find('*'), run.size());
    const auto host = base::parse_int(run.substr(0, star)),
               count = base::parse_int(run.substr(std::min(star + 1, run.size())));
    if (!host || !count || *host < 0 || *host >= world_size || *count < 1 || *count > world_size) break;
    host_indices.insert(host_indices.end(), static_cast<std::size_t>(*count), static_cast<int>(*host));
    if (host_indices.size() > static_cast<std::size_t>(world_size)) break;
  }
  if (host_indices.size() != static_cast<std::size_t>(world_size))
    throw base::Error(Cause::kProtocol, "the roster of ranks is not one of " + std::to_string(world_size));
  return host_indices;
}

/// On rank 0: waits for the records of all ranks, compares them with its own, and publishes the roster.
std::vector<int> call_roll(Store& store, const identity::Identity& id, const Member& self, Deadline deadline) {
  std::vector<Member> members;
  Deadline report = Deadline::in(base::kJoinReportInterval);
  for (int rank = 0; rank < id.world_size; ++rank) {
    const auto text = wait_for(store, member_key(rank), id, deadline, report);
    if (!text) throw_missing(store, id);
    members.push_back(parse_member(*text));
  }
  if (const auto refused = store.find(kRefused, deadline)) throw base::UsageError(*refused);
  std::vector<int> host_indices;
  std::map<std::string, int> hosts;
  bool has_warned = false;
  for (int rank = 0; rank < id.world_size; ++rank) {
    const Member& member = members[static_cast<std::size_t>(rank)];
    compare_facts(self, member, rank, id);
    has_warned = has_warned || warn_about_arguments(self, member, rank);
    const std::string host = member.host + member.host_id;
    host_indices.push_back(hosts.emplace(host, static_cast<int>(hosts.size())).first->second);
  }
  store.set(kRoster, to_text(host_indices), deadline);
  return host_indices;
}

/// On the other ranks: compares this rank with rank 0, and waits for the roster.
std::vector<int> read_roster(Store& store, const identity::Identity& id, const Member& self, Deadline deadline) {
  Deadline report = Deadline::never();  // bounded: rank 0 reports, and the waits end at `deadline`
  const auto first = wait_for(store, member_key(0), id, deadline, report);
  if (!first) throw_missing(store, id);
  compare_facts(parse_member(*first), self, id.rank, id);
  warn_about_arguments(parse_member(*first), self, id.rank);
  const auto text = wait_for(store, std::string(kRoster), id, deadline, report);
  if (!text) throw_missing(store, id);
  return parse_roster(*text, id.world_size);
}

void fill_host_layout(std::vector<int> host_indices, identity::Identity& id) {
  const auto self = static_cast<std::size_t>(id.rank);
  id.host_indices = std::move(host_indices);
  int num_before = 0;
  for (std::size_t rank = 0; rank < id.host_indices.size(); ++rank) {
    if (id.host_indices[rank] != id.host_indices[self]) continue;
    id.local_ranks.push_back(static_cast<int>(rank));
    num_before += rank < self;
  }
  if (id.local_rank < 0) id.local_rank = num_before;
  if (id.local_world_size < 0) id.local_world_size = static_cast<int>(id.local_ranks.size());
  if (id.node_rank < 0) id.node_rank = id.host_indices[self];
  if (id.num_nodes < 0) id.num_nodes = *std::ranges::max_element(id.host_indices) + 1;
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
  fill_host_layout(
      identity.rank == 0 ? call_roll(store, identity, self, deadline) : read_roster(store, identity, self, deadline),
      identity);
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
