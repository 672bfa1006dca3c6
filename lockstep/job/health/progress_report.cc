#include "lockstep/job/health/progress_report.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <utility>

namespace lockstep::job {
namespace {

using base::FlightSeen;
using base::RankSeen;

std::string seconds(std::int64_t nanoseconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", static_cast<double>(std::max<std::int64_t>(nanoseconds, 0)) / 1e9);
  return text;
}

using Place = std::pair<std::string, std::uint64_t>;  // channel, seq

/// How far a rank has come on each channel.
std::map<std::string, std::uint64_t> reached(const RankSeen& rank) {
  std::map<std::string, std::uint64_t> all;
  for (const FlightSeen& one : rank.operations) all[one.channel] = std::max(all[one.channel], one.seq);
  return all;
}

/// "world", "world.ddp0"; not "world.0[1]", nor what two ranks have between them.
bool is_of_all(const std::string& channel) { return channel == "world" || channel.starts_with("world.ddp"); }

/// For each operation in which a rank waits, in the order of their places: who has not come to it.
struct Awaited {
  const FlightSeen* operation = nullptr;
  std::vector<int> missing;
};

std::vector<Awaited> awaited(const std::vector<RankSeen>& ranks) {
  std::map<Place, const FlightSeen*> waited_in;
  for (const RankSeen& rank : ranks)
    for (const FlightSeen& one : rank.operations)
      if (one.goes_on()) waited_in.try_emplace({one.channel, one.seq}, &one);
  std::vector<Awaited> all;
  for (const auto& [place, operation] : waited_in) {
    Awaited one{operation, {}};
    for (const RankSeen& rank : ranks) {
      const auto come = reached(rank);
      const auto found = come.find(place.first);
      const std::uint64_t come_to = found != come.end()                    ? found->second
                                    : is_of_all(place.first) && !rank.left ? 0
                                                                           : place.second;
      if (come_to < place.second) one.missing.push_back(rank.rank);
    }
    if (!one.missing.empty()) all.push_back(std::move(one));
  }
  return all;
}

std::string state_of(const RankSeen& rank, const FlightSeen* now) {
  if (rank.left) return "has left";
  const std::string busy = rank.busy_with.empty() ? "" : "busy with " + rank.busy_with;
  if (!now) return busy.empty() ? "in user code" : busy;
  return (now->given_up() ? "gave up "
          : rank.waiting  ? "waits in "
                          : "in ") +
         describe(*now) + (busy.empty() ? "" : ", " + busy);
}

}  // namespace

const FlightSeen* under_way(const RankSeen& rank) {
  const auto found =
      std::find_if(rank.operations.begin(), rank.operations.end(), [](const FlightSeen& one) { return one.goes_on(); });
  if (found != rank.operations.end()) return &*found;
  return !rank.operations.empty() && rank.operations.back().given_up() ? &rank.operations.back() : nullptr;
}

std::string list_of_ranks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) text += (i == 0 ? "" : ",") + std::to_string(ranks[i]);
  return text;
}

const FlightSeen* last_finished(const RankSeen& rank) {
  const FlightSeen* last = nullptr;
  for (const FlightSeen& one : rank.operations)
    if (one.finished() && (!last || one.ended > last->ended)) last = &one;
  return last;
}

std::string label(const FlightSeen& operation) {
  return operation.kind + (operation.name.empty() ? "" : "(" + operation.name + ")") + "#" +
         std::to_string(operation.seq);
}

std::string describe(const FlightSeen& operation) {
  return label(operation) + " of " + operation.channel +
         (operation.bytes == 0 ? ""
                               : ", " + std::to_string(operation.bytes) + " bytes" +
                                     (operation.dtype.empty() ? "" : " of " + operation.dtype));
}

std::string wavefront(const std::vector<RankSeen>& ranks) {
  struct Line {
    std::vector<int> ranks;
    std::int64_t shortest = 0, longest = 0;  // in the operation, or since it
  };
  std::vector<std::pair<std::string, Line>> lines;  // text without times; as ranks come
  for (const RankSeen& rank : ranks) {
    const FlightSeen* now = under_way(rank);
    const FlightSeen* last = last_finished(rank);
    std::string text = "step " + std::to_string(rank.steps) + ": " + state_of(rank, now);
    if (last) text += "; last finished " + describe(*last);
    const std::int64_t time = rank.looked_ns - (now ? now->begun : last ? last->ended : rank.looked_ns);
    auto found = std::find_if(lines.begin(), lines.end(), [&](const auto& line) { return line.first == text; });
    if (found == lines.end()) found = lines.insert(lines.end(), {text, {{}, time, time}});
    Line& line = found->second;
    line.ranks.push_back(rank.rank);
    line.shortest = std::min(line.shortest, time);
    line.longest = std::max(line.longest, time);
  }
  std::string text;
  for (const auto& [what, line] : lines) {
    const std::string longest = seconds(line.longest);
    text += "  " + list_of_ranks(line.ranks) + ", " + what + "; for " +
            (seconds(line.shortest) == longest ? "" : seconds(line.shortest) + " to ") + longest + "\n";
  }
  for (const Awaited& one : awaited(ranks))
    text += "  " + list_of_ranks(one.missing) + " never came to " + describe(*one.operation) + "\n";
  return text;
}

std::vector<int> to_blame(const std::vector<RankSeen>& ranks) {
  std::vector<int> here, not_waiting;
  for (const RankSeen& rank : ranks) {
    if (rank.left) continue;
    here.push_back(rank.rank);
    if (!rank.waiting) not_waiting.push_back(rank.rank);
  }
  if (!not_waiting.empty()) return not_waiting;
  const auto missing = awaited(ranks);
  return missing.empty() ? here : missing.front().missing;
}

}  // namespace lockstep::job
