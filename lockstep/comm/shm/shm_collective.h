// One collective operation on its way through shared memory.
#pragma once

#include <cstdint>
#include <memory>

#include "lockstep/comm/interface/transport.h"
#include "lockstep/comm/shm/sync_op.h"

namespace lockstep::comm {

/// A Collective. Small tensors go through the boards; large ones are read and written where they lie, by way of a copy
/// when that is not in the arena. An all_reduce of a large one outside it does nothing but find that out: see
/// piecemeal(). With a `call` the ranks compare theirs when they meet, by its key; nothing else happens when they
/// differ.
class Operation final : public Meeting {
 public:
  /// `op` must live as long as this, or until keep().
  Operation(const Collective& op, const Boards& boards, std::uint32_t number, const ComparedCall& call = {});
  ~Operation() override;

  /// Makes `op` its own.
  void keep();
  const Collective& op() const { return *op_; }

  /// Once it is finished: some rank's tensor is outside the arena, nothing has been added, and each rank must go on
  /// with num_pieces() operations, those of piece_of() with the numbers that follow. Pieces stay in cache on their way
  /// in and out.
  bool piecemeal() const { return piecemeal_; }
  /// 0 for what is never done so; else even, so that the operation after has another element of the boards than each of
  /// these may still use.
  static std::uint32_t num_pieces(const Collective& op);
  static Collective piece_of(const Collective& op, std::uint32_t piece);

 private:
  void show() override;
  void work() override;
  void finish() override;
  bool ends_with_work() const override { return small_ || differ_ || piecemeal_; }
  bool anybody_is_outside() const;
  bool all_called_the_same();
  void show_call(Board& own) const;
  void reduce_pieces();
  void reduce_claimed();
  void reduce_into(std::size_t first, std::size_t count, bool everywhere);
  void copy(void* to, const void* from, std::size_t bytes) const;
  char* slot_of(const Board& board) const;
  char* data_of(int member) const;

  std::unique_ptr<const Collective> kept_;
  const Collective* op_;
  const ComparedCall call_;
  const bool small_;
  const bool tiny_;      // so small that it goes with the signal
  bool differ_ = false;  // the calls do
  bool piecemeal_ = false;
  void* staged_ = nullptr;  // in the arena, when the tensor is not
};

}  // namespace lockstep::comm
