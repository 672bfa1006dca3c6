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
class ShmCollective final : public SyncOp {
 public:
  /// `op` must live as long as this, or until keep().
  ShmCollective(const Collective& op, const ControlBlocks& control_blocks, std::uint32_t number,
                const SignatureView& signature = {});
  ~ShmCollective() override;

  /// Makes `op` its own.
  void take_ownership();
  const Collective& op() const { return *op_; }

  /// Once it is finished: some rank's tensor is outside the arena, nothing has been added, and each rank must go on
  /// with num_sub_operations() operations, those of sub_operation_of() with the numbers that follow. Pieces stay in
  /// cache on their way in and out.
  bool needs_sub_operations() const { return needs_sub_operations_; }
  /// 0 for what is never done so; else even, so that the operation after has another element of the boards than each of
  /// these may still use.
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
  const bool fits_counter_;         // so small that it goes with the signal
  bool signatures_differ_ = false;  // the calls do
  bool needs_sub_operations_ = false;
  void* staged_ = nullptr;  // in the arena, when the tensor is not
};

}  // namespace lockstep::comm
