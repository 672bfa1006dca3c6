// A collective operation over shared memory.
#pragma once

#include <cstdint>
#include <memory>

#include "lockstep/comm/interface/transport.h"
#include "lockstep/comm/shm/sync_op.h"

namespace lockstep::comm::shm {

/// Small tensors are copied through the control blocks. Large tensors are read and written where they are, or in a copy
/// in the arena if they are outside it. An all_reduce of a large tensor outside the arena does no work itself: see
/// needs_sub_operations(). With a `signature` the ranks compare the hashes of their calls after they have published; if
/// the hashes differ, no data moves.
class ShmCollective final : public SyncOp {
 public:
  /// `op` must stay valid as long as this object exists, or until take_ownership().
  ShmCollective(const Collective& op, const ControlBlocks& control_blocks, std::uint32_t number,
                const SignatureView& signature = {});
  ~ShmCollective() override;

  /// Copies `op`, so that the caller may destroy it.
  void take_ownership();
  const Collective& op() const { return *op_; }

  /// When the operation is finished: true if the tensor of some rank is outside the arena. Then nothing has been
  /// reduced, and each rank must continue with num_sub_operations() operations, sub_operation_of() with the numbers
  /// that follow. Their data stays in cache between the copies into and out of the arena.
  bool needs_sub_operations() const { return needs_sub_operations_; }
  /// 0 for an operation that is never split. Otherwise an even number, so that the next operation uses another element
  /// of the control blocks than the last sub-operation.
  static std::uint32_t num_sub_operations(const Collective& op);
  static Collective sub_operation_of(const Collective& op, std::uint32_t index);

 private:
  void publish() override;
  void compute() override;
  void complete() override;
  bool is_complete_after_compute() const override {
    return fits_inline_ || signatures_differ_ || needs_sub_operations_;
  }
  bool is_any_outside_arena() const;
  bool signatures_match();
  void publish_signature(ControlBlock& own) const;
  void reduce_own_chunks_first();
  void reduce_chunks();
  void reduce_into(std::size_t first, std::size_t count, bool in_place);
  void copy(void* to, const void* from, std::size_t bytes) const;
  char* inline_data_of(const ControlBlock& control_block) const;
  char* data_of(int member) const;

  std::unique_ptr<const Collective> owned_op_;
  const Collective* op_;
  const SignatureView signature_;
  const bool fits_inline_;
  const bool fits_counter_;  // small enough for SharedCounter::data
  bool signatures_differ_ = false;
  bool needs_sub_operations_ = false;
  void* staged_ = nullptr;  // copy in the arena if the tensor is outside it
};

}  // namespace lockstep::comm::shm
