#include "lockstep/comm/shm/messages.h"

#include <cstring>
#include <utility>

#include "lockstep/comm/arena/arena.h"

namespace lockstep::comm {

void Outbox::post(const at::Tensor& tensor) {
  Arena& arena = Arena::process();
  const void* data = tensor.const_data_ptr();
  if (tensor.nbytes() > 0 && !arena.contains(data)) {
    copy_ = arena.allocate(tensor.nbytes());
    std::memcpy(copy_, data, tensor.nbytes());
    data = copy_;
  }
  Mailbox& mailbox = boards_.mailbox(boards_.rank(), peer_);
  mailbox.letter = {tensor.nbytes() > 0 ? arena.offset_of(data) : 0, tensor.nbytes()};
  boards_.advance(mailbox.sent, ++posted_);
}

void Outbox::release() { Arena::process().free(std::exchange(copy_, nullptr)); }

bool Inbox::take(const at::Tensor& tensor) {
  const Letter& letter = boards_.mailbox(peer_, boards_.rank()).letter;
  if (letter.bytes != tensor.nbytes()) return false;
  if (letter.bytes > 0) std::memcpy(tensor.mutable_data_ptr(), boards_.arena_of(peer_) + letter.offset, letter.bytes);
  boards_.advance(boards_.mailbox(boards_.rank(), peer_).taken, ++taken_);
  return true;
}

}  // namespace lockstep::comm
