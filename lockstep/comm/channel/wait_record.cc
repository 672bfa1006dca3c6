#include "lockstep/comm/channel/wait_record.h"

#include <algorithm>

#include "lockstep/base/parse.h"

namespace lockstep::comm::channel {
namespace {

// One line for the wait, then one per channel.
constexpr char kSeparator = '\x1f';
constexpr const char* kAnyMember = "any";

std::uint64_t to_number(const std::string& text) {
  return static_cast<std::uint64_t>(base::parse_int(text).value_or(0));
}

}  // namespace

std::string WaitRecord::to_text() const {
  std::string line =
      std::to_string(beat) + kSeparator + channel + kSeparator + std::to_string(seq) + kSeparator + text + kSeparator;
  for (const int rank : awaited) line += std::to_string(rank) + ",";
  line += kSeparator;
  if (any_member) line += kAnyMember;
  line += kSeparator + hint;
  for (const auto& [name, number] : started) line += "\n" + name + kSeparator + std::to_string(number);
  return line;
}

std::optional<WaitRecord> WaitRecord::parse(const std::string& text) {
  const auto lines = base::split(text, '\n');
  const auto head = base::split(lines[0], kSeparator);
  if (head.size() != 7) return std::nullopt;
  WaitRecord record{.beat = to_number(head[0]),
                    .channel = head[1],
                    .seq = to_number(head[2]),
                    .text = head[3],
                    .any_member = head[5] == kAnyMember,
                    .hint = head[6]};
  for (const std::string& rank : base::split(head[4], ','))
    if (const auto number = base::parse_int(rank)) record.awaited.push_back(static_cast<int>(*number));
  for (std::size_t i = 1; i < lines.size(); ++i) {
    const auto pair = base::split(lines[i], kSeparator);
    if (pair.size() == 2) record.started[pair[0]] = to_number(pair[1]);
  }
  return record;
}

bool WaitRecord::has_started(const std::string& channel_name, std::uint64_t number) const {
  const auto found = started.find(channel_name);
  return found != started.end() && found->second >= number;
}

bool WaitRecord::waits_for(int rank) const {
  return !any_member && std::find(awaited.begin(), awaited.end(), rank) != awaited.end();
}

}  // namespace lockstep::comm::channel
