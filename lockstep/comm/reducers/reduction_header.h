// ReductionHeader: identifies a rank's step; ranks compare headers before a reduction delivers means.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/interface/gradient_reducer.h"

namespace lockstep::comm::reducers {

/// Sent as raw bytes between ranks of the same build.
struct ReductionHeader {
  std::uint64_t seq;          // of the reduction on its channel
  std::uint64_t layout_hash;  // hash of the layout of buckets
  std::int64_t steps;
  std::uint64_t options_hash;
  std::uint32_t batches;
  std::uint32_t optimizer_steps;
  std::uint32_t local_backwards;
  std::uint32_t failed_backwards;
  std::uint8_t accumulating;
  std::uint8_t joined;
  std::uint8_t divide_by_active;
  std::uint8_t use;
  std::uint8_t already_averaged;
  std::uint8_t stop_requested;
  std::uint16_t sample_order_parts;
  std::uint32_t work_us;  // time that this rank spent on its own before it waited in the previous reduction
  std::uint32_t sample_order_hash;
};
static_assert(sizeof(ReductionHeader) == 64);

ReductionHeader make_header(std::uint64_t seq, std::uint64_t layout_hash, const StepIdentity& step);

struct HeaderMismatch {
  int rank;          ///< the first rank that differs, as a world rank
  int other;         ///< the world rank that it differs from
  std::string text;  ///< "rank 0 has drawn 12 batches, rank 1 has drawn 13 batches"
  std::string hint;  ///< the remedy
};

/// Returns the first difference, or nothing if all ranks are in the same step. For ranks that have joined, only `seq`
/// and `layout_hash` are compared. `members` are the world ranks that the headers belong to. Pure.
std::optional<HeaderMismatch> find_mismatch(const std::vector<ReductionHeader>& headers,
                                            const std::vector<int>& members);

}  // namespace lockstep::comm::reducers
