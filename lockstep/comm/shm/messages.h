// Point-to-point messages between two ranks of a host.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "lockstep/comm/shm/control_block.h"

namespace lockstep::comm::shm {

// Memory ordering: the sender writes the data and MessageSlot::message, then advances `sent` (release). The receiver
// loads `sent` (acquire) before it reads the message and the data, then advances its own `received` (release). The
// sender loads `received` (acquire) before it writes the next message or frees the data. So there is one message in
// flight per direction, and neither side needs a lock.

/// Sends messages to one peer, one at a time: a send is complete when the peer has received the message. One thread at
/// a time.
class MessageSender {
 public:
  MessageSender(const ControlBlocks& control_blocks, int peer) : control_blocks_(control_blocks), peer_(peer) {}

  /// Publishes `tensor` to the peer; copies it first if it is not in the arena. Does not wait. Throws ArenaFull.
  void post(const at::Tensor& tensor);
  /// Reaches number() when the peer has read the posted message; then call release().
  const SharedCounter& received() const { return control_blocks_.message_slot(peer_, control_blocks_.rank()).received; }
  std::uint32_t number() const { return num_posted_; }
  /// Frees the copy, if there is one.
  void release();

 private:
  const ControlBlocks& control_blocks_;
  const int peer_;
  std::uint32_t num_posted_ = 0;
  void* copy_ = nullptr;
};

/// Receives the messages of one peer. One thread at a time.
class MessageReceiver {
 public:
  MessageReceiver(const ControlBlocks& control_blocks, int peer) : control_blocks_(control_blocks), peer_(peer) {}
  /// Reaches next() when a message has arrived.
  const SharedCounter& sent() const { return control_blocks_.message_slot(peer_, control_blocks_.rank()).sent; }
  std::uint32_t next() const { return num_received_ + 1; }
  /// Copies the message to `tensor` and confirms it. Returns false, and leaves the message where it is, if its size
  /// differs from the tensor's.
  bool receive_into(const at::Tensor& tensor);

 private:
  const ControlBlocks& control_blocks_;
  const int peer_;
  std::uint32_t num_received_ = 0;
};

}  // namespace lockstep::comm::shm
