#include "lockstep/job/health/progress_report.h"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <map>
#include <optional>
#include <utility>

#include "lockstep/base/parse.h"

namespace lockstep::job::health {
namespace {

using base::telemetry::OperationRecord;
using base::telemetry::RankSnapshot;

std::string format_seconds(std::int64_t nanoseconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", static_cast<double>(std::max<std::int64_t>(nanoseconds, 0)) / 1e9);
  return text;
}

/// Returns the highest sequence number of a rank on a channel; nullopt if it has used no operation of it.
std::optional<std::uint64_t> last_seq(const RankSnapshot& rank, const std::string& channel) {
  std::optional<std::uint64_t> last;
  for (const OperationRecord& operation : rank.operations)
    if (operation.channel == channel) last = std::max(last.value_or(0), operation.seq);
  return last;
}

/// Returns whether all ranks use `channel`. True for "world" and "world.ddp0"; false for "world.0[1]" and for the
/// channel of two ranks.
bool is_world_channel(const std::string& channel) { return channel == "world" || channel.starts_with("world.ddp"); }

/// An operation in which at least one rank waits, and the ranks that have not reached it.
struct MissingRanks {
  const OperationRecord* operation = nullptr;
  std::vector<int> missing;
};

std::vector<MissingRanks> find_missing_ranks(const std::vector<RankSnapshot>& ranks) {
  std::map<std::pair<std::string, std::uint64_t>, const OperationRecord*> waiting_operations;  // by channel and seq
  for (const RankSnapshot& rank : ranks)
    for (const OperationRecord& operation : rank.operations)
      if (operation.is_running()) waiting_operations.try_emplace({operation.channel, operation.seq}, &operation);
  std::vector<MissingRanks> result;
  for (const auto& [position, operation] : waiting_operations) {
    MissingRanks entry{operation, {}};
    for (const RankSnapshot& rank : ranks) {
      const bool uses_channel = is_world_channel(position.first) && !rank.has_left;
      if (last_seq(rank, position.first).value_or(uses_channel ? 0 : position.second) < position.second)
        entry.missing.push_back(rank.rank);
    }
    if (!entry.missing.empty()) result.push_back(std::move(entry));
  }
  return result;
}

std::string describe_state(const RankSnapshot& rank, const OperationRecord* now) {
  if (rank.has_left) return "has left";
  if (rank.output_blocked) return "waits for its output to be read";
  const std::string busy = rank.busy_with.empty() ? "" : "busy with " + rank.busy_with;
  if (!now) return busy.empty() ? "in user code" : busy;
  return (now->is_abandoned() ? "abandoned "
          : rank.waiting      ? "waits in "
                              : "in ") +
         describe(*now) + (busy.empty() ? "" : ", " + busy);
}

}  // namespace

const OperationRecord* current_operation(const RankSnapshot& rank) {
  const auto found = std::ranges::find_if(rank.operations, &OperationRecord::is_running);
  if (found != rank.operations.end()) return &*found;
  return !rank.operations.empty() && rank.operations.back().is_abandoned() ? &rank.operations.back() : nullptr;
}

std::string format_ranks(const std::vector<int>& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + base::joined(ranks, ",");
}

const OperationRecord* last_finished_operation(const RankSnapshot& rank) {
  const OperationRecord* last = nullptr;
  for (const OperationRecord& operation : rank.operations)
    if (operation.is_finished() && operation.channel != kPythonCalls && (!last || operation.ended > last->ended))
      last = &operation;
  return last;
}

std::string operation_label(const OperationRecord& operation) {
  return operation.kind + (operation.name.empty() ? "" : "(" + operation.name + ")") + "#" +
         std::to_string(operation.seq);
}

std::string describe(const OperationRecord& operation) {
  return operation_label(operation) + " of " + operation.channel +
         (operation.bytes == 0 ? ""
                               : ", " + std::to_string(operation.bytes) + " bytes" +
                                     (operation.dtype.empty() ? "" : " of " + operation.dtype));
}

std::string progress_report(const std::vector<RankSnapshot>& ranks) {
  struct ReportLine {
    std::vector<int> ranks;
    std::int64_t shortest = 0, longest = 0;  // time in the operation, or since its end
  };
  std::vector<std::pair<std::string, ReportLine>> lines;  // key: the line without times; in the order of the ranks
  for (const RankSnapshot& rank : ranks) {
    const OperationRecord* now = current_operation(rank);
    const OperationRecord* last = last_finished_operation(rank);
    std::string text = "step " + std::to_string(rank.steps) + ": " + describe_state(rank, now);
    if (last) text += "; last finished " + describe(*last);
    const std::int64_t time = rank.read_at_ns - (now ? now->started : last ? last->ended : rank.read_at_ns);
    auto found = std::ranges::find(lines, text, &decltype(lines)::value_type::first);
    if (found == lines.end()) found = lines.insert(lines.end(), {text, {{}, time, time}});
    ReportLine& line = found->second;
    line.ranks.push_back(rank.rank);
    line.shortest = std::min(line.shortest, time);
    line.longest = std::max(line.longest, time);
  }
  std::string text;
  for (const auto& [what, line] : lines) {
    const std::string longest = format_seconds(line.longest);
    text += "  " + format_ranks(line.ranks) + ", " + what + "; for " +
            (format_seconds(line.shortest) == longest ? "" : format_seconds(line.shortest) + " to ") + longest + "\n";
  }
  for (const MissingRanks& entry : find_missing_ranks(ranks))
    text += "  " + format_ranks(entry.missing) + (entry.missing.size() == 1 ? " has" : " have") + " not reached " +
            describe(*entry.operation) + "\n";
  return text;
}

std::vector<int> culprit_ranks(const std::vector<RankSnapshot>& ranks) {
  std::vector<int> present, not_waiting;
  for (const RankSnapshot& rank : ranks) {
    if (rank.has_left) continue;
    present.push_back(rank.rank);
    if (!rank.waiting) not_waiting.push_back(rank.rank);
  }
  const auto missing = find_missing_ranks(ranks);
  for (const MissingRanks& entry : missing) {
    std::vector<int> absent;  // of those that do not wait
    std::ranges::copy_if(entry.missing, std::back_inserter(absent),
                         [&](int rank) { return std::ranges::find(not_waiting, rank) != not_waiting.end(); });
    if (!absent.empty()) return absent;
  }
  if (!not_waiting.empty()) return not_waiting;
  return missing.empty() ? present : missing.front().missing;
}

}  // namespace lockstep::job::health
