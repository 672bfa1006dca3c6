// Gradients reduced where they lie: who has shown which, and which pieces are taken.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "lockstep/comm/interface/peer_memory_reducer.h"
#include "lockstep/comm/shm/sync_op.h"

namespace lockstep::comm {

/// One part of one rank, in shared memory; its owner writes it. What it says counts in the round that `shown` names.
struct PublishedGradient {
  std::atomic<std::uint32_t> round{0};
  std::uint32_t flags = 0;
  std::uint64_t offset = 0;  // in the owner's arena
};

/// Piece by piece, `kChunkBytes` each, parts are claimed by whoever comes: during backward at most this rank's share of
/// a part, or the rank that is later would do all the work; at the end whatever is left. Which rank adds does not
/// change the sum. Where pieces go to sinks at the end only, small parts are claimed several at a time.
class GradientTable final : public PeerMemoryReducer {
 public:
  static constexpr std::size_t kChunkBytes = 512 << 10;
  static_assert(kChunkBytes / sizeof(double) % Piece::kAlignment == 0);
  using StartSyncOp = std::function<PendingPtr(const std::function<std::shared_ptr<SyncOp>(std::uint32_t number)>&)>;

  /// `meet` puts a meeting among the transport's operations. Waits for the others' tables. Throws CommError.
  GradientTable(const std::vector<at::Tensor>& gradients, const ControlBlocks& control_blocks,
                std::shared_ptr<job::Store> store, std::chrono::milliseconds timeout, StartSyncOp start_sync_op);

  bool is_peer_accessible(const void* address) const override;
  at::Tensor make_peer_accessible(const at::Tensor& part, at::IntArrayRef strides) override;
  void open(EarlyWork early) override;
  void consume_early(ChunkSink& sink, int divisor) override;
  void show(std::size_t index, void* data, bool fresh) override;
  PendingPtr finish() override;
  PendingPtr finish_consuming(ChunkSink* sink, int divisor, bool first_only) override;
  bool dense(std::size_t index) const override { return states_[index].dense; }
  bool sparse(std::size_t index) const override { return states_[index].sparse; }
  const void* mean(std::size_t index) const override;
  bool has_remote_readers() const override { return has_remote_readers_; }
  SharedAllocation allocate_shared(std::size_t bytes) override;

 private:
  class ReduceRound;
  class ConsumeRound;
  struct GradientLayout {
    at::ScalarType dtype;
    std::size_t num_elements;
    std::size_t chunk_elements;
    std::uint32_t num_chunks;
  };
  struct State {
    std::uint32_t num_claimed = 0;  // pieces that this rank has claimed
    int source = -1;                // the lowest member that has shown it
    bool dense = false;
    bool sparse = false;
  };
  /// What is claimed at once when pieces go to sinks: parts [first, last) whole, or elements of one.
  struct WorkBatch {
    std::size_t first;
    std::size_t last;
    std::size_t begin;
    std::size_t end;
  };
  void make_batches();
  void scan();
  void consume_rest(ChunkSink& sink, int divisor, bool first_only);
  void consume_batches(ChunkSink& sink, int divisor, bool first_only);
  void consume_chunk(ChunkSink& sink, const Piece& chunk, bool first_only);
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
  void reduce_rest();

  std::vector<GradientLayout> layouts_;
  std::vector<WorkBatch> batches_;
  const ControlBlocks& control_blocks_;
  const std::shared_ptr<job::Store> store_;
  const std::chrono::milliseconds timeout_;
  const StartSyncOp start_sync_op_;
  std::vector<PublishedGradient*> entries_;  // of each member
  std::atomic<std::uint64_t>* claims_ =
      nullptr;  // by part, then one for lots, in the first member's table: round and next piece
  std::uint32_t round_ = 0;
  EarlyWork early_ = EarlyWork::kReduce;
  ChunkSink* early_sink_ = nullptr;  // EarlyWork::kConsume: not before there is one
  int early_divisor_ = 1;
  int num_allocations_ = 0;
  std::vector<State> states_;
  std::vector<std::size_t> unprocessed_;  // parts shown by this rank of which its share is not done
  bool has_remote_readers_ = false;
};

}  // namespace lockstep::comm
