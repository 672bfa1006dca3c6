#include "lockstep/launch/protocol/network_messages.h"

#include <algorithm>
#include <cstdio>
#include <numeric>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/launch/hosts/agent_link.h"
#include "lockstep/launch/protocol/connectivity_probe.h"
#include "lockstep/launch/hosts/agent_query.h"
#include "lockstep/launch/cli/interface_filter.h"

namespace lockstep::launcher {
namespace {

using namespace std::chrono_literals;

constexpr int kLauncher = -1;       // its number in a Crossing
constexpr auto kAgentsAnswer = 7s;  // they give a connection 5
constexpr const char* kFirewall =
    "does a firewall forbid it? --interface NAME, or a network such as 10.0.0.0/8, says which addresses are meant";

std::string text_of(const std::vector<base::InterfaceAddress>& addresses) {
  std::string text;
  for (const base::InterfaceAddress& one : addresses)
    text += (text.empty() ? "" : ", ") + one.address + " (" + one.interface + ")";
  return text;
}

class Meeter {
 public:
  Meeter(std::vector<AgentLink>& agents, int signals)
      : agents_(agents),
        crossing_(kLauncher, token_),
        inquiry_(agents, crossing_, signals, [&](std::size_t i, const std::string& why) {
          throw NotMet("host " + base::quoted(agents_[i].host(), 253) + ": " + why, "", {i});
        }) {}

  Meeting run(const std::vector<std::string>& interfaces, const std::string& own);

 private:
  void ask_all(FrameKind question, const Inquiry::Payload& payload, FrameKind answer, const Inquiry::Take& take);
  int way_of_all(const std::vector<MeetReply>& replies, const std::vector<base::InterfaceAddress>& own) const;
  void check(const std::vector<std::vector<ProbeFailure>>& failures, const Meeting& meeting) const;

  std::vector<AgentLink>& agents_;
  std::string token_ = Crossing::new_token();
  Crossing crossing_;
  Inquiry inquiry_;
};

void Meeter::ask_all(FrameKind question, const Inquiry::Payload& payload, FrameKind answer, const Inquiry::Take& take) {
  std::vector<std::size_t> all(agents_.size());
  std::iota(all.begin(), all.end(), 0);
  inquiry_.ask(all, question, payload, answer, kAgentsAnswer, take);
}

/// The first of our addresses that all hosts reach.
int Meeter::way_of_all(const std::vector<MeetReply>& replies, const std::vector<base::InterfaceAddress>& own) const {
  const auto leads = [](const MeetReply& reply, int way) {
    return std::any_of(reply.doors.begin(), reply.doors.end(), [&](const Door& door) { return door.launcher == way; });
  };
  for (int way = 0; way < static_cast<int>(own.size()); ++way)
    if (std::all_of(replies.begin(), replies.end(), [&](const MeetReply& reply) { return leads(reply, way); }))
      return way;
  std::string first;
  std::vector<std::size_t> lost;
  for (std::size_t i = 0; i < replies.size(); ++i) {
    if (replies[i].error.empty()) continue;
    lost.push_back(i);
    const std::string line =
        "host " + base::quoted(agents_[i].host(), 253) + " does not reach this host: " + replies[i].error;
    std::fprintf(stderr, "lockstep: %s\n", line.c_str());
    if (first.empty()) first = line;
  }
  throw NotMet(first.empty() ? "no address of this host is reached by all hosts: " + text_of(own) : first, kFirewall,
               std::move(lost));
}

void Meeter::check(const std::vector<std::vector<ProbeFailure>>& failures, const Meeting& meeting) const {
  const auto name = [&](std::size_t node) {
    return base::quoted(agents_[node].host(), 253) + " (" + meeting.doors[node].address.host + ", " +
           meeting.doors[node].interface + ")";
  };
  std::string first;
  int count = 0;
  for (std::size_t i = 0; i < failures.size(); ++i)
    for (const ProbeFailure& failure : failures[i]) {
      if (failure.node < 0 || failure.node >= static_cast<int>(agents_.size())) continue;
      const std::string line =
          "host " + name(i) + " does not reach " + name(static_cast<std::size_t>(failure.node)) + ": " + failure.why;
      if (++count <= 100) std::fprintf(stderr, "lockstep: %s\n", line.c_str());
      if (first.empty()) first = line;
    }
  if (count > 0)
    throw NotMet(first + (count > 1 ? ", and " + std::to_string(count - 1) + " more" : ""), kFirewall,
                 who_is_in_the_way(failures));
}

Meeting Meeter::run(const std::vector<std::string>& interfaces, const std::string& own) {
  const std::vector<base::InterfaceAddress> addresses = launcher_addresses(own);
  std::vector<base::Address> listening;
  for (const base::InterfaceAddress& one : addresses) listening.push_back(crossing_.listen(one.address));
  std::vector<MeetReply> replies(agents_.size());
  const auto order = [&](std::size_t i) {
    return encode_meet({static_cast<int>(i), token_, interfaces[i], listening});
  };
  ask_all(FrameKind::kMeet, order, FrameKind::kMet,
          [&](std::size_t i, const std::string& payload) { replies[i] = decode_met(payload); });
  const int way = way_of_all(replies, addresses);

  Meeting meeting{.launcher = addresses[static_cast<std::size_t>(way)].address, .doors = {}, .tethers = {}};
  ProbeOrder probe{.launcher = way, .peers = {}};
  for (const MeetReply& reply : replies) {
    meeting.doors.push_back(
        *std::find_if(reply.doors.begin(), reply.doors.end(), [&](const Door& door) { return door.launcher == way; }));
    probe.peers.push_back(meeting.doors.back().address);
  }
  for (std::size_t i = 0; i < agents_.size(); ++i)
    meeting.tethers.push_back(
        crossing_.take_caller(static_cast<int>(i), static_cast<std::size_t>(way), meeting.doors[i].dial));
  std::vector<std::vector<ProbeFailure>> failures(agents_.size());
  ask_all(
      FrameKind::kProbe, [&](std::size_t) { return encode_probe(probe); }, FrameKind::kProbed,
      [&](std::size_t i, const std::string& payload) { failures[i] = decode_probed(payload); });
  check(failures, meeting);
  return meeting;
}

}  // namespace

std::vector<std::size_t> who_is_in_the_way(const std::vector<std::vector<ProbeFailure>>& failures) {
  std::vector<std::pair<std::size_t, std::size_t>> pairs;
  for (std::size_t from = 0; from < failures.size(); ++from)
    for (const ProbeFailure& failure : failures[from])
      if (failure.node >= 0 && static_cast<std::size_t>(failure.node) < failures.size())
        pairs.emplace_back(from, failure.node);
  std::vector<std::size_t> found;
  while (!pairs.empty()) {
    std::vector<int> counts(failures.size());
    for (const auto& [from, to] : pairs) {
      ++counts[from];
      ++counts[to];
    }
    const auto most =
        static_cast<std::size_t>(std::max_element(counts.rbegin(), counts.rend()).base() - counts.begin()) -
        1;  // the last of them
    std::erase_if(pairs, [&](const auto& pair) { return pair.first == most || pair.second == most; });
    found.push_back(most);
  }
  return found;
}

std::vector<base::InterfaceAddress> launcher_addresses(const std::string& own) {
  std::vector<base::InterfaceAddress> all = base::interface_addresses();
  std::erase_if(all, [](const base::InterfaceAddress& one) {
    return one.loopback || one.address.find('%') != std::string::npos;
  });
  if (all.empty())
    throw base::Error(base::Cause::kPeerUnreachable,
                      "this host has no address but those of its loopback, so no other host can reach it",
                      "is its network up?");
  if (own.empty()) return all;
  const InterfaceChoice choice = parse_interface_choice("--interface", own);
  std::vector<base::InterfaceAddress> chosen;
  for (const base::InterfaceAddress& one : all)
    if (allows(choice, one.interface, one.address)) chosen.push_back(one);
  return chosen.empty() ? all : chosen;
}

Meeting meet(std::vector<AgentLink>& agents, const std::vector<std::string>& interfaces, const std::string& own,
             int signals) {
  return Meeter(agents, signals).run(interfaces, own);
}

}  // namespace lockstep::launcher
