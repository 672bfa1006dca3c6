// WaitRecord: what a rank that waits for a long time publishes in the store, for the DeadlockDetectors of the others.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::comm::channel {

/// The wait that blocks a rank, and the operations that it has started.
struct WaitRecord {
  std::uint64_t beat = 0;                        ///< changes only while the rank is blocked
  std::string channel;                           ///< of the operation in which the rank is blocked; empty if it is not
  std::uint64_t seq = 0;                         ///< number of that operation on the channel
  std::string text;                              ///< "all_reduce(float32[1024])"
  std::vector<int> awaited;                      ///< world ranks that take part in it
  bool any_member = false;                       ///< one of them, other than this one, suffices
  std::string hint = {};                         ///< the remedy if the ranks wait in different operations; may be empty
  std::map<std::string, std::uint64_t> started;  ///< number of operations that the rank has started on each channel

  std::string to_text() const;
  /// Returns nothing for a text that is no record.
  static std::optional<WaitRecord> parse(const std::string& text);

  bool has_started(const std::string& channel_name, std::uint64_t number) const;
  /// Whether the wait cannot end without `rank`.
  bool waits_for(int rank) const;
};

}  // namespace lockstep::comm::channel
