#include "lockstep/comm/shm/gradient_table.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <new>

#include "lockstep/comm/arena/arena.h"
#include "lockstep/comm/shm/reduce.h"

namespace lockstep::comm {
namespace {

constexpr std::uint32_t kFresh = 1;
constexpr std::uint32_t kHere = 2;    // there is memory
constexpr std::uint32_t kSparse = 4;
constexpr std::size_t kAhead = 8;     // parts that show() looks at: ranks show them in about one order

}  // namespace

/// The meeting at the end of a round.
class GradientTable::End final : public Meeting {
 public:
  End(GradientTable& table, std::uint32_t number) : Meeting(table.boards_, number), table_(table) {}

 private:
  void show() override {}
  void work() override { table_.reduce_rest(); }
  void finish() override {}
  bool ends_with_work() const override { return false; }
  GradientTable& table_;
};

GradientTable::GradientTable(const std::vector<at::Tensor>& parts, const Boards& boards, job::Store& store, base::Deadline deadline,
                             Meet meet)
    : boards_(boards), meet_(std::move(meet)), states_(parts.size()) {
  for (const at::Tensor& part : parts) {
    const auto count = static_cast<std::size_t>(part.numel());
    const std::size_t piece = kPieceBytes / part.element_size();
    parts_.push_back({part.scalar_type(), count, piece, static_cast<std::uint32_t>((count + piece - 1) / piece)});
  }
  // Never freed: a neighbour may look at it after this rank has gone on.
  const std::size_t bytes = parts.size() * (sizeof(Showing) + sizeof(std::uint64_t));
  auto* memory = static_cast<char*>(Arena::process().allocate(bytes));
  for (std::size_t i = 0; i < parts.size(); ++i) {
    new (memory + i * sizeof(Showing)) Showing();
    new (memory + parts.size() * sizeof(Showing) + i * sizeof(std::uint64_t)) std::atomic<std::uint64_t>(0);
  }
  for (void* table : boards.swap(store, memory, bytes, deadline)) tables_.push_back(static_cast<Showing*>(table));
  claims_ = reinterpret_cast<std::atomic<std::uint64_t>*>(tables_[0] + parts.size());
}

bool GradientTable::reaches(const void* address) const { return Arena::process().contains(address); }

at::Tensor GradientTable::make_reachable(const at::Tensor& part, at::IntArrayRef strides) {
  void* memory = Arena::process().allocate(part.nbytes());
  return at::from_blob(memory, part.sizes(), strides, [](void* block) { Arena::process().free(block); }, part.options().requires_grad(false));
}

void GradientTable::open() {
  ++round_;
  states_.assign(parts_.size(), {});
  waiting_.clear();
  anybody_reads_ = false;
}

void GradientTable::show(std::size_t index, void* data, bool fresh) {
  Showing& mine = tables_[static_cast<std::size_t>(boards_.rank())][index];
  mine.flags = (fresh ? kFresh : 0) | (data ? kHere : kSparse);
  mine.offset = data ? Arena::process().offset_of(data) : 0;
  mine.shown.store(round_, std::memory_order_release);
  waiting_.push_back(index);
  help();
}

bool GradientTable::shown_by_all(std::size_t index) const {
  bool fresh = false;
  for (int member = 0; member < boards_.size(); ++member) {
    const Showing& theirs = showing(member, index);
    if (theirs.shown.load(std::memory_order_acquire) != round_ || (theirs.flags & kHere) == 0) return false;
    fresh |= (theirs.flags & kFresh) != 0;
  }
  return fresh;
}

/// How many pieces of a part this rank may do while others are still in backward. Small parts go round.
std::uint32_t GradientTable::share_of(std::size_t index) const {
  const auto size = static_cast<std::uint32_t>(boards_.size());
  const std::uint32_t pieces = parts_[index].num_pieces;
  const bool one_more = (index + static_cast<std::size_t>(boards_.rank())) % size < pieces % size;
  return pieces / size + (one_more ? 1 : 0);
}

/// Takes the next piece of a part. The claim's word begins a new round by itself.
bool GradientTable::claim(std::size_t index, std::uint32_t& piece) {
  std::atomic<std::uint64_t>& word = claims_[index];
  std::uint64_t seen = word.load(std::memory_order_relaxed);
  for (;;) {
    piece = seen >> 32 == round_ ? static_cast<std::uint32_t>(seen) : 0;
    if (piece >= parts_[index].num_pieces) return false;
    const std::uint64_t next = std::uint64_t{round_} << 32 | (piece + 1);
    if (word.compare_exchange_weak(seen, next, std::memory_order_relaxed)) return true;
  }
}

void GradientTable::reduce_pieces(std::size_t index, std::uint32_t at_most) {
  const Part& part = parts_[index];
  std::uint32_t piece = 0;
  while (states_[index].taken < at_most && claim(index, piece)) {
    ++states_[index].taken;
    const std::size_t first = piece * part.piece_elements;
    const std::size_t offset = first * c10::elementSize(part.dtype);
    c10::SmallVector<const void*, 16> inputs;
    c10::SmallVector<void*, 16> outputs;
    for (int member = 0; member < boards_.size(); ++member) {
      const Showing& theirs = showing(member, index);
      if (theirs.shown.load(std::memory_order_acquire) != round_ || (theirs.flags & kHere) == 0) continue;
      char* data = boards_.arena_of(member) + theirs.offset + offset;
      inputs.push_back(data);
      outputs.push_back(data);
    }
    reduce({.dtype = part.dtype, .op = ReduceOp::kSum, .inputs = inputs.data(), .num_inputs = inputs.size(), .outputs = outputs.data(),
            .num_outputs = outputs.size(), .count = std::min(part.piece_elements, part.num_elements - first), .divisor = boards_.size()});
  }
}

void GradientTable::help() {
  std::size_t looked = 0;
  for (auto at = waiting_.begin(); at != waiting_.end() && looked < kAhead; ++looked) {
    if (!shown_by_all(*at)) {
      ++at;
      continue;
    }
    reduce_pieces(*at, share_of(*at));
    at = waiting_.erase(at);
  }
}

PendingPtr GradientTable::finish() {
  return meet_([this](std::uint32_t number) { return std::make_shared<End>(*this, number); });
}

/// All have shown what they have.
void GradientTable::reduce_rest() {
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    State& state = states_[i];
    int num_here = 0;
    for (int member = 0; member < boards_.size(); ++member) {
      const Showing& theirs = showing(member, i);
      if (theirs.shown.load(std::memory_order_acquire) != round_) continue;
      const bool fresh = (theirs.flags & kFresh) != 0;
      if ((theirs.flags & kSparse) != 0) state.sparse |= fresh;
      if ((theirs.flags & kHere) == 0) continue;
      state.dense |= fresh;
      if (num_here++ == 0) state.source = member;
    }
    if (!state.dense) continue;
    anybody_reads_ |= num_here < boards_.size();
    reduce_pieces(i, parts_[i].num_pieces);
  }
}

const void* GradientTable::mean(std::size_t index) const {
  const int source = states_[index].source;
  return source < 0 ? nullptr : boards_.arena_of(source) + showing(source, index).offset;
}

}  // namespace lockstep::comm
