#include "lockstep/comm/tcp/schedule.h"

#include <algorithm>
#include <cstring>

#include "lockstep/base/error.h"
#include "lockstep/comm/shm/reduce.h"

namespace lockstep::comm::tcp {
namespace {

constexpr std::size_t kMaxOneStepBytes = 32 << 10;  // that a rank sends in an all_reduce of one step
constexpr std::size_t kMaxFlatBroadcastBytes = 64 << 10;
constexpr std::size_t kChunkBytes = 512 << 10;
constexpr std::size_t kPipelineDepth = 3;  // chunks whose values are in flight

/// The bytes of a tensor that the operation does not change.
char* read(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<char*>(const_cast<void*>(tensor.const_data_ptr())) : nullptr;
}
char* written(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<char*>(tensor.mutable_data_ptr()) : nullptr;
}

void copy(char* to, const char* from, std::size_t bytes) {
  if (bytes > 0 && to != from) std::memmove(to, from, bytes);
}

class Builder {
 public:
  Builder(const Collective& op, int rank, int size, const std::function<Scratch()>& take_scratch)
      : op_(op), rank_(rank), size_(size), take_scratch_(take_scratch) {}

  StepSchedule build() {
    const std::size_t in_bytes = op_.input.defined() ? op_.input.nbytes() : 0;
    const std::size_t out_bytes = op_.output.defined() ? op_.output.nbytes() : 0;
    switch (op_.kind) {
      case CollectiveKind::kAllReduce:
        if (in_bytes * static_cast<std::size_t>(size_ - 1) <= kMaxOneStepBytes)
          reduce_everywhere();
        else
          reduce_by_parts();
        break;
      case CollectiveKind::kReduce:
      case CollectiveKind::kReduceScatter: reduce_by_parts(); break;
      case CollectiveKind::kBroadcast:
        if (size_ == 2 || in_bytes <= kMaxFlatBroadcastBytes)
          broadcast_directly();
        else
          broadcast_by_parts();
        break;
      case CollectiveKind::kAllGather:
      case CollectiveKind::kGather: exchange(in_bytes, {read(op_.input), false}, {written(op_.output), true}); break;
      case CollectiveKind::kScatter: exchange(out_bytes, {read(op_.input), true}, {written(op_.output), false}); break;
      case CollectiveKind::kAllToAll:
        exchange(in_bytes / static_cast<std::size_t>(size_), {read(op_.input), true}, {written(op_.output), true});
        break;
      case CollectiveKind::kBarrier: exchange(0, {}, {}); break;
      case CollectiveKind::kSend:
      case CollectiveKind::kRecv: throw base::UsageError("tcp: send and recv have no schedule");
    }
    return std::move(schedule_);
  }

 private:
  /// Memory of an exchange, with one part for each rank or with one in all.
  struct Side {
    char* data = nullptr;
    bool has_parts = false;
    char* part(int rank, std::size_t bytes) const {
      return has_parts ? data + static_cast<std::size_t>(rank) * bytes : data;
    }
  };

  /// The other ranks, beginning with the next one, so that not all ranks send to the first one at the same time.
  template <typename Visit>
  void for_each_peer(const Visit& visit) const {
    for (int i = 1; i < size_; ++i) visit((rank_ + i) % size_);
  }

  Step& add_step(std::ptrdiff_t after = -1) {
    schedule_.steps.emplace_back();
    schedule_.steps.back().after = after;
    return schedule_.steps.back();
  }

  /// Sends parts of `bytes` bytes to all ranks and receives them from all; in a gather and a scatter, only the root
  /// does.
  void exchange(std::size_t bytes, Side out, Side in) {
    Step& step = add_step();
    const bool gathers = op_.kind == CollectiveKind::kGather, scatters = op_.kind == CollectiveKind::kScatter;
    const bool is_root = rank_ == op_.root;
    if (is_root || !(gathers || scatters))
      step.compute = [to = in.part(rank_, bytes), from = out.part(rank_, bytes), bytes] { copy(to, from, bytes); };
    for_each_peer([&](int peer) {
      const bool sends = gathers ? peer == op_.root : !scatters || is_root;
      const bool receives = scatters ? peer == op_.root : !gathers || is_root;
      if (sends) step.transfers.push_back({peer, true, out.part(peer, bytes), bytes});
      if (receives) step.transfers.push_back({peer, false, in.part(peer, bytes), bytes});
    });
  }

  void broadcast_directly() {
    Step& step = add_step();
    for_each_peer([&](int peer) {
      if (rank_ == op_.root || peer == op_.root)
        step.transfers.push_back({peer, rank_ == op_.root, written(op_.input), op_.input.nbytes()});
    });
  }

  char* allocate(std::size_t bytes) {
    Scratch& scratch = schedule_.scratch = take_scratch_();
    if (scratch.bytes < bytes) scratch = {std::unique_ptr<char[]>(new char[bytes]), bytes};
    return scratch.data.get();
  }

  /// outputs = the reduction of this rank's `own` and of what is received from the others.
  std::function<void()> reduction(const char* own, char* output, std::size_t count, const char* received,
                                  std::size_t received_stride) const {
    return [dtype = op_.input.scalar_type(), op = op_.op, own, output, count, received, received_stride, rank = rank_,
            size = size_] {
      c10::SmallVector<const void*, 16> inputs;
      for (int peer = 0; peer < size; ++peer)
        inputs.push_back(peer == rank ? own : received + static_cast<std::size_t>(peer) * received_stride);
      shm::reduce_to(output, inputs, dtype, op, count, op == ReduceOp::kMean ? size : 1);
    };
  }

  void reduce_everywhere() {
    char* data = written(op_.input);
    const std::size_t bytes = op_.input.nbytes();
    char* received = allocate(bytes * static_cast<std::size_t>(size_ + 1));
    char* sent = received + bytes * static_cast<std::size_t>(size_);  // the reduction writes to the tensor itself
    Step& step = add_step();
    step.compute = [data, sent, bytes] { copy(sent, data, bytes); };
    for_each_peer([&](int peer) {
      step.transfers.push_back({peer, true, sent, bytes});
      step.transfers.push_back({peer, false, received + static_cast<std::size_t>(peer) * bytes, bytes});
    });
    add_step(0).compute = reduction(sent, data, static_cast<std::size_t>(op_.input.numel()), received, bytes);
  }

  /// The elements of `rank`'s part that are in chunk `chunk`.
  struct Range {
    std::size_t first, count;
  };
  struct Parts {
    std::size_t total;
    std::size_t part;  // elements of a part; the last ones may have fewer
    std::size_t chunk;
    std::size_t num_chunks() const { return std::max<std::size_t>(1, (part + chunk - 1) / chunk); }
    Range range(int rank, std::size_t index) const {
      const std::size_t begin = static_cast<std::size_t>(rank) * part;
      const std::size_t end = std::min(begin + part, total);
      const std::size_t first = std::min(begin + index * chunk, end);
      return {first, std::min(chunk, end - first)};
    }
  };
  Parts parts_of(std::size_t total, bool equal) const {
    const std::size_t element = op_.input.element_size();
    const auto size = static_cast<std::size_t>(size_);
    std::size_t part = (total + size - 1) / size;
    if (!equal) part = (part + 63) / 64 * 64;  // parts begin at cache lines
    return {total, part, std::max<std::size_t>(1, kChunkBytes / element)};
  }

  /// Calls `first(i)` for all chunks i, and `second(i)` for the same ones, each after first(i + kPipelineDepth - 1).
  template <typename First, typename Second>
  static void pipeline(std::size_t num_chunks, const First& first, const Second& second) {
    for (std::size_t i = 0; i < num_chunks + kPipelineDepth; ++i) {
      if (i >= kPipelineDepth) second(i - kPipelineDepth);
      if (i < num_chunks) first(i);
    }
  }

  void reduce_by_parts() {
    const bool scatters = op_.kind == CollectiveKind::kReduceScatter;
    const std::size_t element = op_.input.element_size();
    const Parts parts = parts_of(static_cast<std::size_t>(op_.input.numel()), scatters);
    char* data = scatters ? read(op_.input) : written(op_.input);
    const std::size_t stride = std::min(parts.chunk, parts.part) * element;
    const std::size_t num_slots = std::min(kPipelineDepth, parts.num_chunks());
    char* received = allocate(num_slots * static_cast<std::size_t>(size_) * stride);
    std::vector<std::ptrdiff_t> arrival(parts.num_chunks());  // the step that receives the values of a chunk
    const auto slot = [&](std::size_t chunk) {
      return received + chunk % num_slots * static_cast<std::size_t>(size_) * stride;
    };
    const auto send_values = [&](std::size_t chunk) {
      arrival[chunk] = static_cast<std::ptrdiff_t>(schedule_.steps.size());
      Step& step = add_step();
      const std::size_t own_bytes = parts.range(rank_, chunk).count * element;
      for_each_peer([&](int peer) {
        const Range theirs = parts.range(peer, chunk);
        step.transfers.push_back({peer, true, data + theirs.first * element, theirs.count * element});
        step.transfers.push_back({peer, false, slot(chunk) + static_cast<std::size_t>(peer) * stride, own_bytes});
      });
    };
    const auto send_results = [&](std::size_t chunk) {
      Step& step = add_step(arrival[chunk]);
      const Range own = parts.range(rank_, chunk);
      char* input = data + own.first * element;
      char* output = scatters ? written(op_.output) + chunk * parts.chunk * element : input;
      if (own.count > 0) step.compute = reduction(input, output, own.count, slot(chunk), stride);
      if (scatters) return;
      for_each_peer([&](int peer) {
        const Range theirs = parts.range(peer, chunk);
        const bool to_all = op_.kind == CollectiveKind::kAllReduce;
        if (to_all || peer == op_.root) step.transfers.push_back({peer, true, output, own.count * element});
        if (to_all || rank_ == op_.root)
          step.transfers.push_back({peer, false, data + theirs.first * element, theirs.count * element});
      });
    };
    pipeline(parts.num_chunks(), send_values, send_results);
  }

  void broadcast_by_parts() {
    const std::size_t element = op_.input.element_size();
    const Parts parts = parts_of(static_cast<std::size_t>(op_.input.numel()), false);
    char* data = written(op_.input);
    std::vector<std::ptrdiff_t> arrival(parts.num_chunks());
    const auto transfer = [&](Step& step, int peer, bool sends, Range range) {
      step.transfers.push_back({peer, sends, data + range.first * element, range.count * element});
    };
    const bool is_root = rank_ == op_.root;
    const auto scatter = [&](std::size_t chunk) {
      arrival[chunk] = static_cast<std::ptrdiff_t>(schedule_.steps.size());
      Step& step = add_step();
      for_each_peer([&](int peer) {
        if (is_root || peer == op_.root) transfer(step, peer, is_root, parts.range(is_root ? peer : rank_, chunk));
      });
    };
    const auto gather = [&](std::size_t chunk) {
      Step& step = add_step(is_root ? -1 : arrival[chunk]);
      for_each_peer([&](int peer) {
        if (peer != op_.root) transfer(step, peer, true, parts.range(rank_, chunk));
        if (!is_root) transfer(step, peer, false, parts.range(peer, chunk));
      });
    };
    pipeline(parts.num_chunks(), scatter, gather);
  }

  const Collective& op_;
  const int rank_;
  const int size_;
  const std::function<Scratch()>& take_scratch_;
  StepSchedule schedule_;
};

}  // namespace

StepSchedule make_schedule(const Collective& op, int rank, int size, const std::function<Scratch()>& take_scratch) {
  return Builder(op, rank, size, take_scratch).build();
}

}  // namespace lockstep::comm::tcp
