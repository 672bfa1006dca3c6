#include "lockstep/comm/reducers/reduction_header.h"

#include <array>
#include <cstring>
#include <functional>

namespace lockstep::comm::reducers {
namespace {

struct HeaderField {
  std::int64_t (*value)(const ReductionHeader&);
  std::string (*text)(std::int64_t);  // continues "rank 0 "; null for a hash
  const char* hint;
  bool compares_joined = false;  // also compared with ranks that have joined
  std::string (*text_of_hashes)(const ReductionHeader&, const ReductionHeader&, const std::string& ranks) = nullptr;
};

std::string count_text(std::int64_t n, const char* one, const char* many) {
  return std::to_string(n) + " " + (n == 1 ? one : many);
}

/// Returns "the loaders of rank 0 and rank 1 have different seeds, batch sizes".
std::string loader_text(const ReductionHeader& a, const ReductionHeader& b, const std::string& ranks) {
  constexpr std::array kParts = {"seeds", "epochs", "batch sizes", "datasets, shuffle options or modes"};
  std::string parts;
  for (std::size_t i = 0; i < kParts.size(); ++i)
    if (((a.sample_order_parts ^ b.sample_order_parts) >> (4 * i) & 0xf) != 0)
      parts += (parts.empty() ? "" : ", ") + std::string(kParts[i]);
  return "the loaders of " + ranks + " have different " +
         (parts.empty() ? "seeds, epochs, batch sizes or datasets" : parts);
}

std::string optimizer_text(const ReductionHeader&, const ReductionHeader&, const std::string& ranks) {
  return "the optimizers of " + ranks +
         " have different options, such as the learning rate, or have made different numbers of steps";
}

constexpr std::array kUseTexts = {"averages gradients", "computes the norm of gradients", "updates parameters",
                                  "updates parameters in backward()"};

// The hints of several fields. Two common mistakes: a rank that skips a batch (an empty or broken one), and an
// optimizer that evaluates a closure until the loss of its own rank is small enough.
constexpr const char* kCountsHint =
    "every rank must call backward() and step() for each batch, or all must skip it; give the ranks equally many "
    "batches, or put the loop under lockstep::join(). An optimizer that calls a closure, such as LBFGS, needs the same "
    "loss on all ranks: all_reduce() it in the closure";
constexpr const char* kCallsHint = "make the same calls of the optimizer, with the same arguments, on all ranks";

const HeaderField kFields[] = {
    {[](const ReductionHeader& h) { return static_cast<std::int64_t>(h.seq); },
     [](std::int64_t v) { return "is in reduction " + std::to_string(v); }, kCountsHint, true},
    {[](const ReductionHeader& h) { return static_cast<std::int64_t>(h.layout_hash); },
     [](std::int64_t v) { return "has the bucket layout " + std::to_string(v); },
     "build the same model, with the same options, on all ranks", true},
    {[](const ReductionHeader& h) { return std::int64_t{h.batches}; },
     [](std::int64_t v) { return "has drawn " + count_text(v, "batch", "batches"); }, kCountsHint},
    {[](const ReductionHeader& h) { return std::int64_t{h.sample_order_hash}; }, nullptr,
     "pass the same dataset and the same options to make_loader() on all ranks, and iterate over the same epoch", false,
     loader_text},
    {[](const ReductionHeader& h) { return h.steps; },
     [](std::int64_t v) { return "has completed " + count_text(v, "step", "steps"); }, kCountsHint},
    {[](const ReductionHeader& h) { return std::int64_t{h.optimizer_steps}; },
     [](std::int64_t v) { return "has made " + count_text(v, "optimizer step", "optimizer steps"); }, kCountsHint},
    {[](const ReductionHeader& h) { return std::int64_t{h.use}; },
     [](std::int64_t v) { return std::string(kUseTexts.at(static_cast<std::size_t>(v))); }, kCallsHint},
    {[](const ReductionHeader& h) { return std::int64_t{h.local_backwards}; },
     [](std::int64_t v) { return "has called backward() " + count_text(v, "time", "times"); },
     "every rank must call step() after the same number of backward() calls, or all must skip it; put a backward() "
     "that only one rank calls, or that not all call equally often, under no_sync()"},
    {[](const ReductionHeader& h) { return std::int64_t{h.failed_backwards}; },
     [](std::int64_t v) { return "has had " + count_text(v, "backward() call", "backward() calls") + " fail"; },
     "if one rank catches an exception of backward(), the others must skip that batch as well"},
    {[](const ReductionHeader& h) { return std::int64_t{h.accumulating}; },
     [](std::int64_t v) { return std::string(v ? "accumulates into existing gradients" : "has fresh gradients"); },
     "call zero_grad() on all ranks alike; on all ranks, put the backward() calls that only accumulate under "
     "no_sync()"},
    {[](const ReductionHeader& h) { return std::int64_t{h.already_averaged}; },
     [](std::int64_t v) { return std::string(v ? "has averaged gradients" : "has local gradients"); }, kCallsHint},
    {[](const ReductionHeader& h) { return static_cast<std::int64_t>(h.options_hash); }, nullptr,
     "set the same options, and call step() equally often, on all ranks", false, optimizer_text},
};

}  // namespace

ReductionHeader make_header(std::uint64_t seq, std::uint64_t layout_hash, const StepIdentity& step) {
  ReductionHeader header;
  std::memset(&header, 0, sizeof header);
  header.seq = seq;
  header.layout_hash = layout_hash;
  header.steps = step.steps;
  header.batches = static_cast<std::uint32_t>(step.batches);
  header.sample_order_hash = step.sample_order_hash;
  header.sample_order_parts = step.sample_order_parts;
  header.optimizer_steps = static_cast<std::uint32_t>(step.optimizer_steps);
  header.local_backwards = static_cast<std::uint32_t>(step.local_backwards);
  header.failed_backwards = static_cast<std::uint32_t>(step.failed_backwards);
  header.accumulating = step.accumulating;
  header.joined = step.joined;
  header.divide_by_active = step.divide_by_active;
  header.use = static_cast<std::uint8_t>(step.use);
  header.already_averaged = step.already_averaged;
  header.stop_requested = step.stop_requested;
  header.options_hash = step.options_hash;
  return header;
}

std::optional<HeaderMismatch> find_mismatch(const std::vector<ReductionHeader>& headers,
                                            const std::vector<int>& members) {
  for (const HeaderField& field : kFields) {
    std::optional<std::size_t> first;
    for (std::size_t i = 0; i < headers.size(); ++i) {
      if (headers[i].joined && !field.compares_joined) continue;
      if (!first) {
        first = i;
        continue;
      }
      const std::int64_t a = field.value(headers[*first]);
      const std::int64_t b = field.value(headers[i]);
      if (a == b) continue;
      const std::string first_rank = "rank " + std::to_string(members[*first]),
                        rank = "rank " + std::to_string(members[i]);
      return HeaderMismatch{members[i], members[*first],
                            field.text ? first_rank + " " + field.text(a) + ", " + rank + " " + field.text(b)
                                       : field.text_of_hashes(headers[*first], headers[i], first_rank + " and " + rank),
                            field.hint};
    }
  }
  return std::nullopt;
}

}  // namespace lockstep::comm::reducers
