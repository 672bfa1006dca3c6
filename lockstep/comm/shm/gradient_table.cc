#include "lockstep/comm/shm/gradient_table.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/SmallVector.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/host_memory.h"
#include "lockstep/base/net/abstract_socket.h"
#include "lockstep/base/net/unix_socket.h"
#include "lockstep/base/shared_memory.h"
#include "lockstep/base/telemetry/comm_time.h"
#include "lockstep/comm/arena/arena_stats.h"
#include "lockstep/comm/arena/memory_shortage.h"
#include "lockstep/comm/shm/reduce.h"
#include "lockstep/job/store.h"

namespace lockstep::comm::shm {
namespace {

using base::Deadline;
using base::SharedMemory;

constexpr const char* kOfferKey = "common";

/// The first byte of the value of kOfferKey.
enum class OfferKind : char {
  kSocket = 's',  ///< the path of rank 0's socket follows
  kError = 'e',   ///< the text of rank 0's error follows, and its hint after a line break
};

void publish_offer(job::Store& store, OfferKind kind, std::string_view text, Deadline deadline) {
  std::string value(1, static_cast<char>(kind));
  store.set(kOfferKey, value.append(text), deadline);
}

SharedMemory create(job::Store& store, int size, std::size_t bytes, Deadline deadline) {
  const auto throw_shortage = [bytes](const base::HostMemory& host, int error_number) {
    const arena::MemoryShortage shortage =
        arena::examine_shortage(bytes, host, error_number, arena::arena_stats().resident_bytes);
    throw base::CommError(base::Cause::kResource, "optimizer", 0, 0,
                          "parameters and state shared by the ranks of this host: " + describe(shortage),
                          remedy(shortage));
  };
  const base::HostMemory host = base::HostMemory::now();
  if (host.available_bytes < bytes + arena::bytes_kept_free()) throw_shortage(host, 0);
  SharedMemory memory = SharedMemory::create("lockstep-common", bytes);
  memory.interleave();  // its pages are allocated here, and used by all ranks of the host
  if (const int error = memory.reserve(0, bytes)) throw_shortage(base::HostMemory::now(), error);
  const base::net::AbstractListener listener("lockstep-rank-");
  publish_offer(store, OfferKind::kSocket, listener.name(), deadline);
  for (int others = size - 1; others > 0; --others)
    base::net::send_fd(listener.accept(deadline).get(), bytes, memory.fd().get());
  return memory;
}

/// Reports an error to the other ranks, so that they do not wait until the deadline.
SharedMemory create_or_report(job::Store& store, int size, std::size_t bytes, Deadline deadline) {
  try {
    return create(store, size, bytes, deadline);
  } catch (const base::Error& error) {
    publish_offer(store, OfferKind::kError, std::string(error.what()) + '\n' + error.hint(), deadline);
    throw;
  }
}

SharedMemory receive(job::Store& store, int rank, std::size_t bytes, Deadline deadline) {
  const auto offer = store.get(kOfferKey, deadline);
  if (!offer)
    throw base::CommError(base::Cause::kJoinTimeout, "optimizer", rank, 0,
                          "the first rank of this host did not offer its shared memory in time");
  if (offer->front() == static_cast<char>(OfferKind::kError)) {
    const std::size_t end = offer->rfind('\n');
    throw base::CommError(base::Cause::kResource, "optimizer", rank, 0, offer->substr(1, end - 1),
                          offer->substr(end + 1));
  }
  base::net::FdMessage message = base::net::receive_fd(base::net::connect_abstract(offer->substr(1)).get(), deadline);
  if (message.label != bytes)
    throw base::CommError(base::Cause::kDesync, "optimizer", rank, 0,
                          "the first rank of this host allocated " + std::to_string(message.label) +
                              " shared bytes; expected " + std::to_string(bytes) + " on this rank");
  return SharedMemory::map(std::move(message.fd), bytes);
}

/// Rank 0 of the `size` ranks creates the memory and passes its descriptor to the others over a private socket. `store`
/// is used by this call alone. The memory has no name in the file system, so the kernel frees it with the last mapping.
/// All its pages exist when the call returns, so touching them cannot fail.
/// A child made by fork() does not inherit it, except what the owner registers (arena::ForkCopied). Blocks until rank 0
/// has served this rank. Throws CommError on every rank, with kResource if the host has less memory available or the
/// kernel refuses it.
SharedAllocation make_shared_allocation(job::Store& store, int rank, int size, std::size_t bytes, Deadline deadline) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t page_aligned_bytes = (bytes + page - 1) / page * page;
  try {
    auto memory = std::make_shared<SharedMemory>(rank == 0 ? create_or_report(store, size, page_aligned_bytes, deadline)
                                                           : receive(store, rank, page_aligned_bytes, deadline));
    memory->set_dumped(0, memory->size(), true);
    return {.memory = std::move(memory), .is_first = rank == 0};
  } catch (const base::SystemError& error) {
    throw base::CommError(error.cause(), "optimizer", rank, -1,
                          std::string("cannot share memory with the ranks of this host: ") + error.what(),
                          error.hint());
  }
}

// PublishedGradient::flags
constexpr std::uint32_t kFresh = 1;
constexpr std::uint32_t kDense = 2;  // `offset` is valid
constexpr std::uint32_t kSparse = 4;
// The number of gradients that publish() checks. A few are enough, because all ranks publish in nearly the same order.
constexpr std::size_t kMaxScanned = 8;

/// Ends a round: `work` does what is left when all ranks have published.
template <typename Work>
class RoundEnd final : public SyncOp {
 public:
  RoundEnd(SyncOpQueue& queue, const Work& work)
      : SyncOp(queue.control_blocks(), queue.reserve_numbers(1)), work_(work) {}

 private:
  void compute() override { work_(); }
  bool is_complete_after_compute() const override { return false; }
  const Work work_;
};

}  // namespace

GradientTable::GradientTable(const std::vector<at::Tensor>& gradients, SyncOpQueue& queue, Options options)
    : queue_(queue),
      control_blocks_(queue.control_blocks()),
      options_(std::move(options)),
      states_(gradients.size()),
      presence_(gradients.size()) {
  for (const at::Tensor& gradient : gradients) {
    const auto count = static_cast<std::size_t>(gradient.numel());
    const std::size_t chunk = options_.chunk_bytes / gradient.element_size();
    layouts_.push_back({gradient.scalar_type(), count, chunk, static_cast<std::uint32_t>((count + chunk - 1) / chunk)});
  }
  make_batches();
  // Never freed: a peer may read it after this rank has destroyed its GradientTable.
  const std::size_t bytes =
      gradients.size() * sizeof(PublishedGradient) + (gradients.size() + 1) * sizeof(std::uint64_t);
  auto* memory = static_cast<char*>(control_blocks_.arena().allocate(bytes));
  for (std::size_t i = 0; i < gradients.size(); ++i) new (memory + i * sizeof(PublishedGradient)) PublishedGradient();
  for (std::size_t i = 0; i <= gradients.size(); ++i)
    new (memory + gradients.size() * sizeof(PublishedGradient) + i * sizeof(std::uint64_t))
        base::Atomic<std::uint64_t>(0);
  const base::Deadline deadline = base::Deadline::in(options_.timeout);
  for (void* table : control_blocks_.exchange_addresses(*options_.store, memory, bytes, deadline))
    entries_.push_back(static_cast<PublishedGradient*>(table));
  claims_ = reinterpret_cast<base::Atomic<std::uint64_t>*>(entries_[0] + gradients.size());
}

bool GradientTable::is_peer_accessible(const void* address) const { return control_blocks_.arena().contains(address); }

at::Tensor GradientTable::make_peer_accessible(const at::Tensor& gradient, at::IntArrayRef strides) {
  arena::Arena& arena = control_blocks_.arena();
  return at::from_blob(
      arena.allocate(gradient.nbytes()), gradient.sizes(), strides, [&arena](void* block) { arena.free(block); },
      gradient.options().requires_grad(false));
}

/// Puts consecutive small gradients into one batch, up to the size of a chunk, and splits large ones into batches.
void GradientTable::make_batches() {
  const auto bytes = [this](std::size_t index) {
    return layouts_[index].num_elements * c10::elementSize(layouts_[index].dtype);
  };
  for (std::size_t i = 0; i < layouts_.size();) {
    const GradientLayout& layout = layouts_[i];
    if (layout.num_chunks > 1) {
      for (std::size_t begin = 0; begin < layout.num_elements; begin += layout.chunk_elements)
        batches_.push_back({i, i + 1, begin, std::min(begin + layout.chunk_elements, layout.num_elements)});
      ++i;
      continue;
    }
    std::size_t last = i;
    std::size_t batch_bytes = 0;
    while (last < layouts_.size() && batch_bytes + bytes(last) <= options_.chunk_bytes) batch_bytes += bytes(last++);
    batches_.push_back({i, last, 0, 0});
    i = last;
  }
}

void GradientTable::begin_round(EarlyWork early) {
  ++round_;
  early_ = early;
  early_sink_ = nullptr;
  states_.assign(layouts_.size(), {});
  presence_.assign(layouts_.size(), {});
  unprocessed_.clear();
  has_remote_readers_ = false;
}

void GradientTable::consume_early(ChunkSink& sink, int divisor) {
  early_sink_ = &sink;
  early_divisor_ = divisor;
}

void GradientTable::publish(std::size_t index, void* data, bool fresh) {
  PublishedGradient& own_entry = entries_[static_cast<std::size_t>(control_blocks_.rank())][index];
  own_entry.flags = (fresh ? kFresh : 0) | (data ? kDense : kSparse);
  own_entry.offset = data ? control_blocks_.arena().offset_of(data) : 0;
  own_entry.round.store(round_, std::memory_order_release);
  if (early_ == EarlyWork::kNone) return;
  unprocessed_.push_back(index);
  if (early_ == EarlyWork::kReduce || early_sink_) process_ready();
}

bool GradientTable::has_published(int member, std::size_t index) const {
  const PublishedGradient& peer_entry = entry(member, index);
  return peer_entry.round.load(std::memory_order_acquire) == round_ && (peer_entry.flags & kDense) != 0;
}

bool GradientTable::is_published_by_all(std::size_t index) const {
  bool fresh = false;
  for (int member = 0; member < control_blocks_.size(); ++member) {
    if (!has_published(member, index)) return false;
    fresh |= (entry(member, index).flags & kFresh) != 0;
  }
  return fresh;
}

/// The number of chunks of a gradient that this rank may process while others are still in backward(). The remainder of
/// the division goes to the ranks in turn, so that small gradients are spread over them.
std::uint32_t GradientTable::early_share_of(std::size_t index) const {
  const auto size = static_cast<std::uint32_t>(control_blocks_.size());
  const std::uint32_t num_chunks = layouts_[index].num_chunks;
  const bool takes_remainder = (index + static_cast<std::size_t>(control_blocks_.rank())) % size < num_chunks % size;
  return num_chunks / size + (takes_remainder ? 1 : 0);
}

/// Claims the next number below `limit`. Returns false if none is left. A word of an earlier round counts as 0.
bool GradientTable::claim(std::size_t index, std::uint32_t limit, std::uint32_t& number) {
  base::Atomic<std::uint64_t>& word = claims_[index];
  std::uint64_t seen = word.load(std::memory_order_relaxed);
  for (;;) {
    number = seen >> 32 == round_ ? static_cast<std::uint32_t>(seen) : 0;
    if (number >= limit) return false;
    const std::uint64_t next = std::uint64_t{round_} << 32 | (number + 1);
    if (word.compare_exchange_weak(seen, next, std::memory_order_relaxed)) return true;
  }
}

/// Claims chunks of a gradient and calls `visit(first, count)` for each, until this rank has claimed `max_chunks` of it
/// or none is left.
template <typename Visit>
void GradientTable::claim_chunks(std::size_t index, std::uint32_t max_chunks, const Visit& visit) {
  const GradientLayout& layout = layouts_[index];
  std::uint32_t chunk = 0;
  while (states_[index].num_claimed < max_chunks && claim(index, layout.num_chunks, chunk)) {
    ++states_[index].num_claimed;
    const std::size_t first = chunk * layout.chunk_elements;
    visit(first, std::min(layout.chunk_elements, layout.num_elements - first));
  }
}

void GradientTable::reduce_chunk(std::size_t index, std::size_t first, std::size_t count) {
  const std::size_t offset = first * c10::elementSize(layouts_[index].dtype);
  c10::SmallVector<const void*, 16> inputs;
  c10::SmallVector<void*, 16> outputs;
  for (int member = 0; member < control_blocks_.size(); ++member) {
    if (!has_published(member, index)) continue;
    char* data = control_blocks_.arena_of(member) + entry(member, index).offset + offset;
    inputs.push_back(data);
    outputs.push_back(data);
  }
  reduce({.dtype = layouts_[index].dtype,
          .op = ReduceOp::kSum,
          .inputs = inputs.data(),
          .num_inputs = inputs.size(),
          .outputs = outputs.data(),
          .num_outputs = outputs.size(),
          .count = count,
          .divisor = control_blocks_.size()});
}

/// Processes chunks of a gradient before the end of the round.
void GradientTable::process_early(std::size_t index, std::uint32_t max_chunks) {
  claim_chunks(index, max_chunks, [&](std::size_t first, std::size_t count) {
    if (early_sink_)
      consume_chunk(*early_sink_, {.gradient_index = index, .offset = first, .count = count, .divisor = early_divisor_},
                    false);
    else
      reduce_chunk(index, first, count);
  });
}

void GradientTable::process_ready() {
  std::size_t scanned = 0;
  for (auto it = unprocessed_.begin(); it != unprocessed_.end() && scanned < kMaxScanned; ++scanned) {
    if (!is_published_by_all(*it)) {
      ++it;
      continue;
    }
    process_early(*it, early_share_of(*it));
    it = unprocessed_.erase(it);
  }
}

PendingPtr GradientTable::finish() {
  const auto reduce_rest = [this] {
    scan();
    for (std::size_t i = 0; i < layouts_.size(); ++i)
      if (presence_[i].dense)
        claim_chunks(i, layouts_[i].num_chunks,
                     [&](std::size_t first, std::size_t count) { reduce_chunk(i, first, count); });
  };
  const auto end = std::make_shared<RoundEnd<decltype(reduce_rest)>>(queue_, reduce_rest);
  return queue_.add([end](base::Deadline deadline) { return end->advance(deadline); });
}

PendingPtr GradientTable::finish_consuming(ChunkSink* sink, int divisor, bool first_only) {
  // What no rank has consumed before the end of the round: the rest of the chunks, or all gradients, in batches.
  const auto consume_rest = [this, sink, divisor, first_only] {
    scan();
    if (!sink || has_sparse_gradient()) return;
    const auto consume = [&](std::size_t index, std::size_t first, std::size_t count) {
      if (presence_[index].dense && count > 0)
        consume_chunk(*sink, {.gradient_index = index, .offset = first, .count = count, .divisor = divisor},
                      first_only);
    };
    if (early_ == EarlyWork::kConsume) {
      for (std::size_t i = 0; i < layouts_.size(); ++i)
        if (presence_[i].dense)
          claim_chunks(i, layouts_[i].num_chunks,
                       [&](std::size_t first, std::size_t count) { consume(i, first, count); });
      return;
    }
    std::uint32_t number = 0;
    while (claim(layouts_.size(), static_cast<std::uint32_t>(batches_.size()), number)) {
      const WorkBatch& batch = batches_[number];
      for (std::size_t i = batch.first; i < batch.last; ++i)
        consume(i, batch.begin, batch.end > 0 ? batch.end - batch.begin : layouts_[i].num_elements);
    }
  };
  const auto end = std::make_shared<RoundEnd<decltype(consume_rest)>>(queue_, consume_rest);
  return queue_.add([end](base::Deadline deadline) { return end->advance(deadline); });
}

/// Reads the entries of all members, after all of them have published, into states_ and presence_.
void GradientTable::scan() {
  for (std::size_t i = 0; i < layouts_.size(); ++i) {
    GradientPresence& presence = presence_[i];
    int num_published = 0;
    for (int member = 0; member < control_blocks_.size(); ++member) {
      const PublishedGradient& peer_entry = entry(member, i);
      if (peer_entry.round.load(std::memory_order_acquire) != round_) continue;
      const bool fresh = (peer_entry.flags & kFresh) != 0;
      if ((peer_entry.flags & kSparse) != 0) presence.sparse |= fresh;
      if ((peer_entry.flags & kDense) == 0) continue;
      presence.dense |= fresh;
      if (num_published++ == 0) states_[i].source = member;
    }
    if (presence.dense) has_remote_readers_ |= num_published < control_blocks_.size();
  }
}

bool GradientTable::has_sparse_gradient() const {
  return std::any_of(presence_.begin(), presence_.end(),
                     [](const GradientPresence& presence) { return presence.sparse; });
}

void GradientTable::consume_chunk(ChunkSink& sink, GradientChunk chunk, bool first_only) {
  const std::size_t offset = chunk.offset * c10::elementSize(layouts_[chunk.gradient_index].dtype);
  c10::SmallVector<const void*, 16> gradients;
  for (int member = 0; member < control_blocks_.size(); ++member) {
    if (!has_published(member, chunk.gradient_index)) continue;
    gradients.push_back(control_blocks_.arena_of(member) + entry(member, chunk.gradient_index).offset + offset);
    if (first_only) break;
  }
  chunk.gradients = gradients.data();
  chunk.num_gradients = gradients.size();
  const base::telemetry::CommTime::Pause time;
  sink.consume(chunk);
}

SharedAllocation GradientTable::allocate_shared(std::size_t bytes) {
  job::PrefixStore store("common/" + std::to_string(num_allocations_++), options_.store);
  return make_shared_allocation(store, control_blocks_.rank(), control_blocks_.size(), bytes,
                                base::Deadline::in(options_.timeout));
}

const void* GradientTable::mean(std::size_t index) const {
  const int source = states_[index].source;
  return source < 0 ? nullptr : control_blocks_.arena_of(source) + entry(source, index).offset;
}

}  // namespace lockstep::comm::shm
