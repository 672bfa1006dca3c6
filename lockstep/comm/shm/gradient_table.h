// GradientTable: the gradients that the ranks of a host have published, which are reduced or consumed in place, without
// a copy.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "lockstep/base/atomic.h"
#include "lockstep/comm/interface/chunk_sink.h"
#include "lockstep/comm/interface/pending.h"
#include "lockstep/comm/shm/sync_op.h"

namespace lockstep::comm::shm {

/// The entry of one gradient of one rank, in shared memory. Its owner alone writes it. `flags` and `offset` are valid
/// in the round that `round` names.
struct PublishedGradient {
  base::Atomic<std::uint32_t> round{0};
  std::uint32_t flags = 0;
  std::uint64_t offset = 0;  // in the owner's arena
};

/// What the ranks have published of one gradient in a round.
struct GradientPresence {
  bool dense = false;   ///< some rank published a fresh dense gradient
  bool sparse = false;  ///< some rank has a fresh sparse gradient
};

/// The work that ranks may do before the end of a round, on gradients that all ranks have published.
enum class EarlyWork {
  kNone,
  kReduce,
  kConsume,  ///< pass their chunks to sinks, once consume_early() has set the sink
};

/// A fixed list of gradients, the same on all ranks, reduced in rounds. In each round a rank calls begin_round(), then
/// publish() for each gradient that it has, in any order, then finish() or finish_consuming(). Other ranks may write to
/// a published gradient from publish() until the end of the round, or indefinitely if the round never ends.
///
/// Every rank publishes its gradients in its own table, and all ranks claim chunks to reduce or to consume. During
/// backward() a rank claims at most its share of a gradient; otherwise the rank that publishes last would do all the
/// work. At the end of the round it claims whatever is left. A sum is always in the order of the ranks, whichever rank
/// computes it. If chunks go to sinks only at the end of the round, several small gradients are claimed at once.
///
/// Threads: one thread at a time may use it.
///
/// Memory ordering. Publishing: the owner writes its gradient and the entry's `flags` and `offset`, then stores `round`
/// (release). A rank that loads `round` (acquire) and reads the current round reads that entry and that gradient.
/// Claims: a claim is a 64-bit word, the round in the upper half and the next chunk in the lower one, which a rank
/// increments by a relaxed compare-and-swap. Each chunk is thus given to one rank, and a new round invalidates the old
/// claims without a reset. A claim orders no data.
/// Results: a rank writes the mean of a chunk into its peers' gradients, or updates parameters, before it stores its
/// counters `published` or `completed` for the operation that ends the round (SyncOp). All ranks load these counters
/// (acquire) before that operation is done, so they read all results. An entry is written again only in the next round,
/// when no rank reads it any more.
class GradientTable {
 public:
  static constexpr std::size_t kChunkBytes = 512 << 10;
  static_assert(kChunkBytes / sizeof(double) % GradientChunk::kAlignment == 0);
  struct Options {
    std::shared_ptr<job::Store> store = nullptr;  // used by this table alone
    std::chrono::milliseconds timeout{};          // for connecting the tables
    // The size of a chunk, the same on all ranks. Only tests choose another size, which breaks the alignment that
    // GradientChunk promises.
    std::size_t chunk_bytes = kChunkBytes;
  };

  /// Exchanges the addresses of the tables; blocks until all ranks have called it. Each round ends with an operation of
  /// `queue`, which must outlive the table. Throws CommError.
  GradientTable(const std::vector<at::Tensor>& gradients, SyncOpQueue& queue, Options options);

  GradientTable(const GradientTable&) = delete;
  GradientTable& operator=(const GradientTable&) = delete;

  /// Returns whether the other ranks can read and write memory at `address`.
  bool is_peer_accessible(const void* address) const;
  /// Returns an uninitialized tensor that the other ranks can access, with the shape, dtype and device of `gradient`
  /// and with `strides`.
  at::Tensor make_peer_accessible(const at::Tensor& gradient, at::IntArrayRef strides);

  /// Starts a round. `early` must be equal on all ranks that publish in this round. Before the end of the round, a rank
  /// does at most its share of the early work.
  void begin_round(EarlyWork early);
  /// Sets the sink of a round of EarlyWork::kConsume: from now on publish() passes chunks to `sink`. Call it only if
  /// all ranks publish in this round, and after it is certain that they run the same update. finish_consuming() must
  /// get the same arguments.
  void consume_early(ChunkSink& sink, int divisor);
  /// Publishes gradient `index` at `data`, contiguous or with the strides that all ranks use for it. If `data` is null,
  /// this rank has a sparse gradient, which is not reduced here. `fresh` as in GradientReducer::ready().
  void publish(std::size_t index, void* data, bool fresh);
  /// Ends publishing on this rank; does not wait. The result is done when every gradient that is fresh on some rank
  /// holds its mean, on each rank that published it: the sum of the published gradients in rank order, divided by the
  /// number of ranks.
  PendingPtr finish();
  /// Like finish(), but passes chunks to sinks instead of reducing: once every rank has called it, the chunks of
  /// gradients that are fresh on some rank go to the ranks' sinks, with `divisor`. Done when all chunks were consumed.
  /// A rank whose `sink` is null gets none. With `first_only`, the gradients are equal on all ranks already, and a
  /// chunk contains only the first rank's gradient. If some rank published a sparse gradient, no sink gets any more
  /// chunks.
  PendingPtr finish_consuming(ChunkSink* sink, int divisor, bool first_only);

  // Valid after finish() or finish_consuming() is done, until the next begin_round():
  /// Returns what the ranks have published, by gradient. The reference stays valid as long as the table.
  const std::vector<GradientPresence>& presence() const { return presence_; }
  /// Returns where this rank can read the mean of a dense gradient that it has not published itself.
  const void* mean(std::size_t index) const;
  /// Returns whether some rank has not published a gradient that is dense in presence(). Such a rank reads mean(),
  /// and the other ranks must leave that memory unchanged until it has read it.
  bool has_remote_readers() const { return has_remote_readers_; }

  /// Allocates memory that all ranks share. All ranks must call it, in the order of their operations; blocks until they
  /// have. Throws CommError.
  SharedAllocation allocate_shared(std::size_t bytes);

 private:
  struct GradientLayout {
    at::ScalarType dtype;
    std::size_t num_elements;
    std::size_t chunk_elements;
    std::uint32_t num_chunks;
  };
  struct State {
    std::uint32_t num_claimed = 0;  // chunks that this rank has claimed
    int source = -1;                // the lowest member that has published it
  };
  /// The work that is claimed at once when chunks go to sinks: the whole gradients [first, last), or, if `end` is not
  /// 0, the elements [begin, end) of gradient `first`.
  struct WorkBatch {
    std::size_t first;
    std::size_t last;
    std::size_t begin;
    std::size_t end;
  };
  void make_batches();
  void scan();
  bool has_sparse_gradient() const;
  void consume_chunk(ChunkSink& sink, GradientChunk chunk, bool first_only);
  bool has_published(int member, std::size_t index) const;
  const PublishedGradient& entry(int member, std::size_t index) const {
    return entries_[static_cast<std::size_t>(member)][index];
  }
  bool is_published_by_all(std::size_t index) const;
  std::uint32_t early_share_of(std::size_t index) const;
  bool claim(std::size_t word, std::uint32_t limit, std::uint32_t& number);
  template <typename Visit>
  void claim_chunks(std::size_t index, std::uint32_t max_chunks, const Visit& visit);
  void process_early(std::size_t index, std::uint32_t max_chunks);
  void reduce_chunk(std::size_t index, std::size_t first, std::size_t count);
  void process_ready();

  std::vector<GradientLayout> layouts_;
  std::vector<WorkBatch> batches_;
  SyncOpQueue& queue_;
  const ControlBlocks& control_blocks_;
  const Options options_;
  std::vector<PublishedGradient*> entries_;  // the table of each member
  // In the first member's table: one word per gradient, then one for the batches.
  base::Atomic<std::uint64_t>* claims_ = nullptr;
  std::uint32_t round_ = 0;
  EarlyWork early_ = EarlyWork::kReduce;
  ChunkSink* early_sink_ = nullptr;  // set by consume_early(); EarlyWork::kConsume begins then
  int early_divisor_ = 1;
  int num_allocations_ = 0;
  std::vector<State> states_;
  std::vector<GradientPresence> presence_;
  std::vector<std::size_t> unprocessed_;  // published gradients of which this rank has not done its share
  bool has_remote_readers_ = false;
};

}  // namespace lockstep::comm::shm
