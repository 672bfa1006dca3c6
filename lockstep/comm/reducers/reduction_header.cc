#include "lockstep/comm/reducers/reduction_header.h"

#include <array>
#include <cstring>
#include <functional>

namespace lockstep::comm::reducers {
namespace {

struct HeaderField {
  std::int64_t (*value)(const ReductionHeader&);
  std::string (*text)(std::int64_t);
  bool compares_joined;  // also compared with ranks that have joined
};

std::string count_text(std::int64_t n, const char* one, const char* many) {
  return std::to_string(n) + " " + (n == 1 ? one : many);
}

constexpr std::array kUseTexts = {"averages gradients", "computes the norm of gradients", "updates parameters",
                                  "updates parameters in backward()"};

const HeaderField kFields[] = {
    {[](const ReductionHeader& h) { return static_cast<std::int64_t>(h.seq); },
     [](std::int64_t v) { return "is in reduction " + std::to_string(v); }, true},
    {[](const ReductionHeader& h) { return static_cast<std::int64_t>(h.layout_hash); },
     [](std::int64_t v) { return "has the bucket layout " + std::to_string(v); }, true},
    {[](const ReductionHeader& h) { return h.batches; },
     [](std::int64_t v) { return "has drawn " + count_text(v, "batch", "batches"); }, false},
    {[](const ReductionHeader& h) { return std::int64_t{h.sample_order_hash}; },
     [](std::int64_t v) {
       return "has drawn its samples in an order (seed, epoch, shuffle, dataset size) with the hash " +
              std::to_string(v);
     },
     false},
    {[](const ReductionHeader& h) { return h.steps; },
     [](std::int64_t v) { return "has completed " + count_text(v, "step", "steps"); }, false},
    {[](const ReductionHeader& h) { return h.failed_backwards; },
     [](std::int64_t v) { return "has had " + count_text(v, "backward() call", "backward() calls") + " fail"; }, false},
    {[](const ReductionHeader& h) { return std::int64_t{h.accumulating}; },
     [](std::int64_t v) { return std::string(v ? "accumulates into existing gradients" : "has fresh gradients"); },
     false},
    {[](const ReductionHeader& h) { return std::int64_t{h.use}; },
     [](std::int64_t v) { return std::string(kUseTexts.at(static_cast<std::size_t>(v))); }, false},
    {[](const ReductionHeader& h) { return std::int64_t{h.already_averaged}; },
     [](std::int64_t v) { return std::string(v ? "has averaged gradients" : "has local gradients"); }, false},
    {[](const ReductionHeader& h) { return static_cast<std::int64_t>(h.options_hash); },
     [](std::int64_t v) { return "has an optimizer whose options or steps have the hash " + std::to_string(v); },
     false},
};

}  // namespace

ReductionHeader make_header(std::uint64_t seq, std::uint64_t layout_hash, const StepIdentity& step) {
  ReductionHeader header;
  std::memset(&header, 0, sizeof header);
  header.seq = seq;
  header.layout_hash = layout_hash;
  header.steps = step.steps;
  header.batches = step.batches;
  header.sample_order_hash = step.sample_order_hash;
  header.failed_backwards = step.failed_backwards;
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
      if (a != b)
        return HeaderMismatch{members[i], members[*first],
                              "rank " + std::to_string(members[*first]) + " " + field.text(a) + ", rank " +
                                  std::to_string(members[i]) + " " + field.text(b)};
    }
  }
  return std::nullopt;
}

}  // namespace lockstep::comm::reducers
