// Messages between two ranks of a host.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "lockstep/comm/shm/control_block.h"

namespace lockstep::comm {

/// The messages of this rank to one peer, one at a time: sent means received. One thread at a time.
class MessageSender {
 public:
  MessageSender(const ControlBlocks& control_blocks, int peer) : control_blocks_(control_blocks), peer_(peer) {}

  /// Shows `tensor` to the peer, by way of a copy when it is not in the arena.
  void post(const at::Tensor& tensor);
  /// Reaches number() when the peer has read what was posted; then release().
  const SharedCounter& received() const { return control_blocks_.message_slot(peer_, control_blocks_.rank()).received; }
  std::uint32_t number() const { return num_posted_; }
  void release();

 private:
  const ControlBlocks& control_blocks_;
  const int peer_;
  std::uint32_t num_posted_ = 0;
  void* copy_ = nullptr;
};

/// The messages of one peer to this rank.
class MessageReceiver {
 public:
  MessageReceiver(const ControlBlocks& control_blocks, int peer) : control_blocks_(control_blocks), peer_(peer) {}
  /// Reaches next() when one has come.
  const SharedCounter& sent() const { return control_blocks_.message_slot(peer_, control_blocks_.rank()).sent; }
  std::uint32_t next() const { return num_received_ + 1; }
  /// Copies it to `tensor`. False when it has another size; it stays then.
  bool receive_into(const at::Tensor& tensor);

 private:
  const ControlBlocks& control_blocks_;
  const int peer_;
  std::uint32_t num_received_ = 0;
};

}  // namespace lockstep::comm
