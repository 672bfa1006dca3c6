// One collective operation on its way through shared memory.
#pragma once

#include <cstdint>

#include "lockstep/comm/seam/collective.h"
#include "lockstep/comm/shm/meeting.h"

namespace lockstep::comm {

/// A Collective. Small tensors go through the boards; large ones are read and written where they lie, by way of a copy when that is not in
/// the arena.
class Operation final : public Meeting {
 public:
  Operation(const Collective& op, const Boards& boards, std::uint32_t number);
  ~Operation() override;

 private:
  void show() override;
  void work() override;
  void finish() override;
  bool ends_with_work() const override { return small_; }
  void reduce_claimed();
  void reduce_into(std::size_t first, std::size_t count, bool everywhere);
  void copy(void* to, const void* from, std::size_t bytes) const;
  char* data_of(int member) const;

  const Collective op_;
  const bool small_;
  void* staged_ = nullptr;   // in the arena, when the tensor is not
};

}  // namespace lockstep::comm
