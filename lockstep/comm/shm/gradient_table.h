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
struct Showing {
  std::atomic<std::uint32_t> shown{0};
  std::uint32_t flags = 0;
  std::uint64_t offset = 0;  // in the owner's arena
};

/// Piece by piece, `kPieceBytes` each, parts are claimed by whoever comes: during backward at most this rank's share of
/// a part, or the rank that is later would do all the work; at the end whatever is left. Which rank adds does not
/// change the sum. Where pieces go to sinks at the end only, small parts are claimed several at a time.
class GradientTable final : public InPlaceReducer {
 public:
  static constexpr std::size_t kPieceBytes = 512 << 10;
  static_assert(kPieceBytes / sizeof(double) % Piece::kAlignment == 0);
  using Meet = std::function<PendingPtr(const std::function<std::shared_ptr<Meeting>(std::uint32_t number)>&)>;

  /// `meet` puts a meeting among the transport's operations. Waits for the others' tables. Throws CommError.
  GradientTable(const std::vector<at::Tensor>& parts, const Boards& boards, std::shared_ptr<job::Store> store,
                std::chrono::milliseconds timeout, Meet meet);

  bool reaches(const void* address) const override;
  at::Tensor make_reachable(const at::Tensor& part, at::IntArrayRef strides) override;
  void open(Early early) override;
  void give_early(PieceSink& sink, int divisor) override;
  void show(std::size_t index, void* data, bool fresh) override;
  PendingPtr finish() override;
  PendingPtr finish_with(PieceSink* sink, int divisor, bool first_only) override;
  bool dense(std::size_t index) const override { return states_[index].dense; }
  bool sparse(std::size_t index) const override { return states_[index].sparse; }
  const void* mean(std::size_t index) const override;
  bool anybody_reads() const override { return anybody_reads_; }
  CommonMemory make_common(std::size_t bytes) override;

 private:
  class End;
  class Giving;
  struct Part {
    at::ScalarType dtype;
    std::size_t num_elements;
    std::size_t piece_elements;
    std::uint32_t num_pieces;
  };
  struct State {
    std::uint32_t taken = 0;  // pieces that this rank has claimed
    int source = -1;          // the lowest member that has shown it
    bool dense = false;
    bool sparse = false;
  };
  /// What is claimed at once when pieces go to sinks: parts [first, last) whole, or elements of one.
  struct Lot {
    std::size_t first;
    std::size_t last;
    std::size_t begin;
    std::size_t end;
  };
  void make_lots();
  void look();
  void give_rest(PieceSink& sink, int divisor, bool first_only);
  void give_lots(PieceSink& sink, int divisor, bool first_only);
  void give(PieceSink& sink, const Piece& piece, bool first_only);
  bool has_shown(int member, std::size_t index) const;
  const Showing& showing(int member, std::size_t index) const {
    return tables_[static_cast<std::size_t>(member)][index];
  }
  bool shown_by_all(std::size_t index) const;
  std::uint32_t share_of(std::size_t index) const;
  bool claim(std::size_t word, std::uint32_t limit, std::uint32_t& number);
  template <typename Take>
  void take_pieces(std::size_t index, std::uint32_t at_most, const Take& take);
  void work_on(std::size_t index, std::uint32_t at_most);
  void reduce_piece(std::size_t index, std::size_t first, std::size_t count);
  void help();
  void reduce_rest();

  std::vector<Part> parts_;
  std::vector<Lot> lots_;
  const Boards& boards_;
  const std::shared_ptr<job::Store> store_;
  const std::chrono::milliseconds timeout_;
  const Meet meet_;
  std::vector<Showing*> tables_;  // of each member
  std::atomic<std::uint64_t>* claims_ =
      nullptr;  // by part, then one for lots, in the first member's table: round and next piece
  std::uint32_t round_ = 0;
  Early early_ = Early::kReduce;
  PieceSink* early_sink_ = nullptr;  // Early::kGive: not before there is one
  int early_divisor_ = 1;
  int num_common_ = 0;
  std::vector<State> states_;
  std::vector<std::size_t> waiting_;  // parts shown by this rank of which its share is not done
  bool anybody_reads_ = false;
};

}  // namespace lockstep::comm
