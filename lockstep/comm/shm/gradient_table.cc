#include "lockstep/comm/shm/gradient_table.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <new>

#include "lockstep/comm/arena/arena.h"
#include "lockstep/comm/shm/shared_allocation.h"
#include "lockstep/comm/shm/reduce.h"

namespace lockstep::comm {
namespace {

constexpr std::uint32_t kFresh = 1;
constexpr std::uint32_t kHere = 2;  // there is memory
constexpr std::uint32_t kSparse = 4;
constexpr std::size_t kAhead = 8;  // parts that show() looks at: ranks show them in about one order

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

/// The meeting at the end of a round whose pieces go to sinks.
class GradientTable::Giving final : public Meeting {
 public:
  Giving(GradientTable& table, PieceSink* sink, int divisor, bool first_only, std::uint32_t number)
      : Meeting(table.boards_, number), table_(table), sink_(sink), divisor_(divisor), first_only_(first_only) {}

 private:
  void show() override {}
  void work() override {
    table_.look();
    if (sink_) table_.give_rest(*sink_, divisor_, first_only_);
  }
  void finish() override {}
  bool ends_with_work() const override { return false; }
  GradientTable& table_;
  PieceSink* const sink_;
  const int divisor_;
  const bool first_only_;
};

GradientTable::GradientTable(const std::vector<at::Tensor>& parts, const Boards& boards,
                             std::shared_ptr<job::Store> store, std::chrono::milliseconds timeout, Meet meet)
    : boards_(boards), store_(std::move(store)), timeout_(timeout), meet_(std::move(meet)), states_(parts.size()) {
  for (const at::Tensor& part : parts) {
    const auto count = static_cast<std::size_t>(part.numel());
    const std::size_t piece = kPieceBytes / part.element_size();
    parts_.push_back({part.scalar_type(), count, piece, static_cast<std::uint32_t>((count + piece - 1) / piece)});
  }
  make_lots();
  // Never freed: a neighbour may look at it after this rank has gone on.
  const std::size_t bytes = parts.size() * sizeof(Showing) + (parts.size() + 1) * sizeof(std::uint64_t);
  auto* memory = static_cast<char*>(Arena::process().allocate(bytes));
  for (std::size_t i = 0; i < parts.size(); ++i) new (memory + i * sizeof(Showing)) Showing();
  for (std::size_t i = 0; i <= parts.size(); ++i)
    new (memory + parts.size() * sizeof(Showing) + i * sizeof(std::uint64_t)) std::atomic<std::uint64_t>(0);
  const base::Deadline deadline = base::Deadline::in(timeout_);
  for (void* table : boards.swap(*store_, memory, bytes, deadline)) tables_.push_back(static_cast<Showing*>(table));
  claims_ = reinterpret_cast<std::atomic<std::uint64_t>*>(tables_[0] + parts.size());
}

bool GradientTable::reaches(const void* address) const { return Arena::process().contains(address); }

at::Tensor GradientTable::make_reachable(const at::Tensor& part, at::IntArrayRef strides) {
  void* memory = Arena::process().allocate(part.nbytes());
  return at::from_blob(
      memory, part.sizes(), strides, [](void* block) { Arena::process().free(block); },
      part.options().requires_grad(false));
}

/// Neighbouring parts together up to the size of a piece; larger ones cut.
void GradientTable::make_lots() {
  const auto bytes = [this](std::size_t index) {
    return parts_[index].num_elements * c10::elementSize(parts_[index].dtype);
  };
  for (std::size_t i = 0; i < parts_.size();) {
    const Part& part = parts_[i];
    if (part.num_pieces > 1) {
      for (std::size_t begin = 0; begin < part.num_elements; begin += part.piece_elements)
        lots_.push_back({i, i + 1, begin, std::min(begin + part.piece_elements, part.num_elements)});
      ++i;
      continue;
    }
    std::size_t last = i;
    std::size_t together = 0;
    while (last < parts_.size() && together + bytes(last) <= kPieceBytes) together += bytes(last++);
    lots_.push_back({i, last, 0, 0});
    i = last;
  }
}

void GradientTable::open(Early early) {
  ++round_;
  early_ = early;
  early_sink_ = nullptr;
  states_.assign(parts_.size(), {});
  waiting_.clear();
  anybody_reads_ = false;
}

void GradientTable::give_early(PieceSink& sink, int divisor) {
  early_sink_ = &sink;
  early_divisor_ = divisor;
}

void GradientTable::show(std::size_t index, void* data, bool fresh) {
  Showing& mine = tables_[static_cast<std::size_t>(boards_.rank())][index];
  mine.flags = (fresh ? kFresh : 0) | (data ? kHere : kSparse);
  mine.offset = data ? Arena::process().offset_of(data) : 0;
  mine.shown.store(round_, std::memory_order_release);
  if (early_ == Early::kNothing) return;
  waiting_.push_back(index);
  if (early_ == Early::kReduce || early_sink_) help();
}

bool GradientTable::has_shown(int member, std::size_t index) const {
  const Showing& theirs = showing(member, index);
  return theirs.shown.load(std::memory_order_acquire) == round_ && (theirs.flags & kHere) != 0;
}

bool GradientTable::shown_by_all(std::size_t index) const {
  bool fresh = false;
  for (int member = 0; member < boards_.size(); ++member) {
    if (!has_shown(member, index)) return false;
    fresh |= (showing(member, index).flags & kFresh) != 0;
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

/// Takes the next number below `limit`. The claim's word begins a new round by itself.
bool GradientTable::claim(std::size_t index, std::uint32_t limit, std::uint32_t& number) {
  std::atomic<std::uint64_t>& word = claims_[index];
  std::uint64_t seen = word.load(std::memory_order_relaxed);
  for (;;) {
    number = seen >> 32 == round_ ? static_cast<std::uint32_t>(seen) : 0;
    if (number >= limit) return false;
    const std::uint64_t next = std::uint64_t{round_} << 32 | (number + 1);
    if (word.compare_exchange_weak(seen, next, std::memory_order_relaxed)) return true;
  }
}

/// Calls `take(first, count)` for pieces of a part that this rank claims, as long as it has claimed fewer than
/// `at_most`.
template <typename Take>
void GradientTable::take_pieces(std::size_t index, std::uint32_t at_most, const Take& take) {
  const Part& part = parts_[index];
  std::uint32_t piece = 0;
  while (states_[index].taken < at_most && claim(index, part.num_pieces, piece)) {
    ++states_[index].taken;
    const std::size_t first = piece * part.piece_elements;
    take(first, std::min(part.piece_elements, part.num_elements - first));
  }
}

void GradientTable::reduce_piece(std::size_t index, std::size_t first, std::size_t count) {
  const std::size_t offset = first * c10::elementSize(parts_[index].dtype);
  c10::SmallVector<const void*, 16> inputs;
  c10::SmallVector<void*, 16> outputs;
  for (int member = 0; member < boards_.size(); ++member) {
    if (!has_shown(member, index)) continue;
    char* data = boards_.arena_of(member) + showing(member, index).offset + offset;
    inputs.push_back(data);
    outputs.push_back(data);
  }
  reduce({.dtype = parts_[index].dtype,
          .op = ReduceOp::kSum,
          .inputs = inputs.data(),
          .num_inputs = inputs.size(),
          .outputs = outputs.data(),
          .num_outputs = outputs.size(),
          .count = count,
          .divisor = boards_.size()});
}

/// What is done early.
void GradientTable::work_on(std::size_t index, std::uint32_t at_most) {
  take_pieces(index, at_most, [&](std::size_t first, std::size_t count) {
    if (early_sink_)
      give(*early_sink_, {.part = index, .first = first, .count = count, .divisor = early_divisor_}, false);
    else
      reduce_piece(index, first, count);
  });
}

void GradientTable::help() {
  std::size_t looked = 0;
  for (auto at = waiting_.begin(); at != waiting_.end() && looked < kAhead; ++looked) {
    if (!shown_by_all(*at)) {
      ++at;
      continue;
    }
    work_on(*at, share_of(*at));
    at = waiting_.erase(at);
  }
}

PendingPtr GradientTable::finish() {
  return meet_([this](std::uint32_t number) { return std::make_shared<End>(*this, number); });
}

PendingPtr GradientTable::finish_with(PieceSink* sink, int divisor, bool first_only) {
  return meet_(
      [=, this](std::uint32_t number) { return std::make_shared<Giving>(*this, sink, divisor, first_only, number); });
}

/// All have shown what they have: who has what?
void GradientTable::look() {
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
    if (state.dense) anybody_reads_ |= num_here < boards_.size();
  }
}

void GradientTable::reduce_rest() {
  look();
  for (std::size_t i = 0; i < parts_.size(); ++i)
    if (states_[i].dense)
      take_pieces(i, parts_[i].num_pieces,
                  [&](std::size_t first, std::size_t count) { reduce_piece(i, first, count); });
}

void GradientTable::give_rest(PieceSink& sink, int divisor, bool first_only) {
  if (std::any_of(states_.begin(), states_.end(), [](const State& state) { return state.sparse; })) return;
  if (early_ != Early::kGive) return give_lots(sink, divisor, first_only);
  for (std::size_t i = 0; i < parts_.size(); ++i)
    if (states_[i].dense)
      take_pieces(i, parts_[i].num_pieces, [&](std::size_t first, std::size_t count) {
        give(sink, {.part = i, .first = first, .count = count, .divisor = divisor}, first_only);
      });
}

void GradientTable::give_lots(PieceSink& sink, int divisor, bool first_only) {
  std::uint32_t number = 0;
  while (claim(parts_.size(), static_cast<std::uint32_t>(lots_.size()), number)) {
    const Lot& lot = lots_[number];
    for (std::size_t i = lot.first; i < lot.last; ++i) {
      const std::size_t count = lot.end > 0 ? lot.end - lot.begin : parts_[i].num_elements;
      if (states_[i].dense && count > 0)
        give(sink, {.part = i, .first = lot.begin, .count = count, .divisor = divisor}, first_only);
    }
  }
}

void GradientTable::give(PieceSink& sink, const Piece& piece, bool first_only) {
  const std::size_t offset = piece.first * c10::elementSize(parts_[piece.part].dtype);
  c10::SmallVector<const void*, 16> gradients;
  for (int member = 0; member < boards_.size(); ++member) {
    if (!has_shown(member, piece.part)) continue;
    gradients.push_back(boards_.arena_of(member) + showing(member, piece.part).offset + offset);
    if (first_only) break;
  }
  Piece whole = piece;
  whole.gradients = gradients.data();
  whole.num_gradients = gradients.size();
  sink.take(whole);
}

CommonMemory GradientTable::make_common(std::size_t bytes) {
  job::PrefixStore store("common/" + std::to_string(num_common_++), store_);
  return make_common_memory(store, boards_.rank(), boards_.size(), bytes, base::Deadline::in(timeout_));
}

const void* GradientTable::mean(std::size_t index) const {
  const int source = states_[index].source;
  return source < 0 ? nullptr : boards_.arena_of(source) + showing(source, index).offset;
}

}  // namespace lockstep::comm
