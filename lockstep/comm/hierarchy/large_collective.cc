#include "lockstep/comm/hierarchy/large_collective.h"

#include <cstring>

#include "lockstep/comm/arena/arena.h"
#include "lockstep/comm/arena/quarantine.h"

namespace lockstep::comm {

LongOperation::LongOperation(const Collective& op, const Boards& boards, std::uint32_t number, const HostPlan& plan,
                             int rank, Column* column)
    : Meeting(boards, number), op_(op), plan_(plan), rank_(rank), column_(column) {}

LongOperation::~LongOperation() {
  if (!exposed())
    Arena::process().free(staged_);
  else if (!staged_)
    keep_for_ever(op_.input);  // it was given up while others may still write there
}

void LongOperation::show() {
  Arena& arena = Arena::process();
  const void* data = op_.input.const_data_ptr();
  if (op_.kind == Kind::kReduceScatter || !arena.contains(data)) {
    staged_ = arena.allocate(op_.input.nbytes());
    std::memcpy(staged_, data, op_.input.nbytes());
    data = staged_;
  }
  boards_.own().offset[number_ % 2] = arena.offset_of(data);
}

void LongOperation::work() {
  if (!column_) return;
  const auto element = op_.input.element_size();
  const auto place = plan_.places[static_cast<std::size_t>(rank_)];
  const Slice slice = slice_of(static_cast<std::size_t>(op_.input.numel()), plan_.num_columns, place.local);
  Slices slices{.dtype = op_.input.scalar_type(), .count = slice.count};
  for (int local = 0; local < boards_.size(); ++local)
    slices.locals.push_back(boards_.arena_of(local) + boards_.of(local).offset[number_ % 2] + slice.first * element);
  if (op_.kind == Kind::kBroadcast) {
    const auto root = plan_.places[static_cast<std::size_t>(op_.root)];
    return column_->broadcast(slices, root.host, static_cast<std::size_t>(root.local));
  }
  const int divisor = op_.op == ReduceOp::kMean ? static_cast<int>(plan_.places.size()) : 1;
  column_->all_reduce(slices, op_.op, divisor, op_.wire);
}

/// The result belongs into this rank's tensor: of a reduce at the root, of a broadcast everywhere else.
bool LongOperation::written() const {
  return op_.kind == Kind::kAllReduce || (op_.kind == Kind::kReduce) == (op_.root == rank_);
}

void LongOperation::finish() {
  if (!staged_) return;
  const auto* result = static_cast<const char*>(staged_);
  if (op_.kind == Kind::kReduceScatter)
    std::memcpy(op_.output.mutable_data_ptr(), result + op_.output.nbytes() * static_cast<std::size_t>(rank_),
                op_.output.nbytes());
  else if (written())
    std::memcpy(op_.output.mutable_data_ptr(), result, op_.output.nbytes());
  Arena::process().free(std::exchange(staged_, nullptr));
}

}  // namespace lockstep::comm
