// Messages between two ranks of a host.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "lockstep/comm/shm/control_block.h"

namespace lockstep::comm {

/// The messages of this rank to one peer, one at a time: sent means received. One thread at a time.
class Outbox {
 public:
  Outbox(const Boards& boards, int peer) : boards_(boards), peer_(peer) {}

  /// Shows `tensor` to the peer, by way of a copy when it is not in the arena.
  void post(const at::Tensor& tensor);
  /// Reaches number() when the peer has read what was posted; then release().
  const Signal& taken() const { return boards_.mailbox(peer_, boards_.rank()).taken; }
  std::uint32_t number() const { return posted_; }
  void release();

 private:
  const Boards& boards_;
  const int peer_;
  std::uint32_t posted_ = 0;
  void* copy_ = nullptr;
};

/// The messages of one peer to this rank.
class Inbox {
 public:
  Inbox(const Boards& boards, int peer) : boards_(boards), peer_(peer) {}
  /// Reaches next() when one has come.
  const Signal& sent() const { return boards_.mailbox(peer_, boards_.rank()).sent; }
  std::uint32_t next() const { return taken_ + 1; }
  /// Copies it to `tensor`. False when it has another size; it stays then.
  bool take(const at::Tensor& tensor);

 private:
  const Boards& boards_;
  const int peer_;
  std::uint32_t taken_ = 0;
};

}  // namespace lockstep::comm
