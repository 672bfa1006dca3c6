// One collective operation on its way through shared memory.
#pragma once

#include <cstdint>

#include "lockstep/comm/seam/transport.h"
#include "lockstep/comm/shm/meeting.h"

namespace lockstep::comm {

/// A Collective. Small tensors go through the boards; large ones are read and written where they lie, by way of a copy when that is not in
/// the arena. With a `call` the ranks compare theirs when they meet, by its key; nothing else happens when they differ.
class Operation final : public Meeting {
 public:
  Operation(const Collective& op, const Boards& boards, std::uint32_t number, const ComparedCall& call = {});
  ~Operation() override;

 private:
  void show() override;
  void work() override;
  void finish() override;
  bool ends_with_work() const override { return small_ || differ_; }
  bool all_called_the_same();
  void show_call(Board& own) const;
  void reduce_pieces();
  void reduce_claimed();
  void reduce_into(std::size_t first, std::size_t count, bool everywhere);
  void copy(void* to, const void* from, std::size_t bytes) const;
  char* slot_of(const Board& board) const;
  char* data_of(int member) const;

  const Collective op_;
  const ComparedCall call_;
  const bool small_;
  const bool tiny_;          // so small that it goes with the signal
  bool differ_ = false;      // the calls do
  void* staged_ = nullptr;   // in the arena, when the tensor is not
};

}  // namespace lockstep::comm
