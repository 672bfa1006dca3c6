#include "lockstep/comm/shm/messages.h"

#include <cstring>
#include <utility>

namespace lockstep::comm::shm {

void MessageSender::post(const at::Tensor& tensor) {
  arena::Arena& arena = control_blocks_.arena();
  const void* data = tensor.const_data_ptr();
  if (tensor.nbytes() > 0 && !arena.contains(data)) {
    copy_ = arena.allocate(tensor.nbytes());
    std::memcpy(copy_, data, tensor.nbytes());
    data = copy_;
  }
  MessageSlot& message_slot = control_blocks_.message_slot(control_blocks_.rank(), peer_);
  message_slot.message = {tensor.nbytes() > 0 ? arena.offset_of(data) : 0, tensor.nbytes()};
  control_blocks_.advance(message_slot.sent, ++num_posted_);
}

void MessageSender::release() { control_blocks_.arena().free(std::exchange(copy_, nullptr)); }

bool MessageReceiver::receive_into(const at::Tensor& tensor) {
  const ShmMessage& message = control_blocks_.message_slot(peer_, control_blocks_.rank()).message;
  if (message.bytes != tensor.nbytes()) return false;
  if (message.bytes > 0)
    std::memcpy(tensor.mutable_data_ptr(), control_blocks_.arena_of(peer_) + message.offset, message.bytes);
  control_blocks_.advance(control_blocks_.message_slot(control_blocks_.rank(), peer_).received, ++num_received_);
  return true;
}

}  // namespace lockstep::comm::shm
