// What every rank says about itself before gradients move.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/interface/gradient_reducer.h"

namespace lockstep::comm {

/// Travels as raw bytes between ranks of one build.
struct ReductionHeader {
  std::uint64_t seq;   // of the exchange on its channel
  std::uint64_t plan;  // fingerprint of the layout of buckets
  std::int64_t steps;
  std::int64_t batches;
  std::int64_t empty_backwards;
  std::uint64_t options;
  std::uint8_t accumulating;
  std::uint8_t joined;
  std::uint8_t divide_by_active;
  std::uint8_t use;
  std::uint8_t already_averaged;
  std::uint8_t stop_requested;
  std::uint8_t padding[2];
  std::uint32_t work_us;  // this rank's own time in the exchange before, without waiting
  std::uint32_t order;
};
static_assert(sizeof(ReductionHeader) == 64);

ReductionHeader make_header(std::uint64_t seq, std::uint64_t plan, const StepIdentity& step);

struct HeaderMismatch {
  int rank;          ///< the first that differs, as its number in the world
  int other;         ///< from this one
  std::string text;  ///< "rank 0 has drawn 12 batches, rank 1 13"
};

/// Pure. Nothing when all ranks are in the same step. Ranks that have joined are in every step. `members`: the ranks of
/// the world that the headers are of; a difference is told in their numbers.
std::optional<HeaderMismatch> find_mismatch(const std::vector<ReductionHeader>& headers,
                                            const std::vector<int>& members);

}  // namespace lockstep::comm
