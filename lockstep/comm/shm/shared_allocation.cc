#include "lockstep/comm/shm/shared_allocation.h"

#include <unistd.h>

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/host_memory.h"
#include "lockstep/base/net/abstract_socket.h"
#include "lockstep/base/net/unix_socket.h"
#include "lockstep/base/shared_memory.h"
#include "lockstep/comm/arena/arena_stats.h"
#include "lockstep/comm/arena/memory_shortage.h"

namespace lockstep::comm::shm {
namespace {

using base::Deadline;
using base::SharedMemory;

constexpr const char* kOfferKey = "common";

/// The first byte of the value of kOfferKey.
enum class OfferKind : char {
  kSocket = 's',  ///< the path of rank 0's socket follows
  kError = 'e',   ///< the text of rank 0's error follows, and its hint after a line break
};

void publish_offer(job::Store& store, OfferKind kind, std::string_view text, Deadline deadline) {
  std::string value(1, static_cast<char>(kind));
  store.set(kOfferKey, value.append(text), deadline);
}

SharedMemory create(job::Store& store, int size, std::size_t bytes, Deadline deadline) {
  const auto throw_shortage = [bytes](const base::HostMemory& host, int error_number) {
    const arena::MemoryShortage shortage =
        arena::examine_shortage(bytes, host, error_number, arena::arena_stats().resident_bytes);
    throw base::CommError(base::Cause::kResource, "optimizer", 0, 0,
                          "parameters and state shared by the ranks of this host: " + describe(shortage),
                          remedy(shortage));
  };
  const base::HostMemory host = base::HostMemory::now();
  if (host.available_bytes < bytes + arena::bytes_kept_free()) throw_shortage(host, 0);
  SharedMemory memory = SharedMemory::create("lockstep-common", bytes);
  memory.interleave();  // its pages are allocated here, and used by all ranks of the host
  if (const int error = memory.reserve(0, bytes)) throw_shortage(base::HostMemory::now(), error);
  const base::net::AbstractListener listener("lockstep-rank-");
  publish_offer(store, OfferKind::kSocket, listener.name(), deadline);
  for (int others = size - 1; others > 0; --others)
    base::net::send_fd(listener.accept(deadline).get(), bytes, memory.fd().get());
  return memory;
}

/// Reports an error to the other ranks, so that they do not wait until the deadline.
SharedMemory create_or_report(job::Store& store, int size, std::size_t bytes, Deadline deadline) {
  try {
    return create(store, size, bytes, deadline);
  } catch (const base::Error& error) {
    publish_offer(store, OfferKind::kError, std::string(error.what()) + '\n' + error.hint(), deadline);
    throw;
  }
}

SharedMemory receive(job::Store& store, int rank, std::size_t bytes, Deadline deadline) {
  const auto offer = store.get(kOfferKey, deadline);
  if (!offer)
    throw base::CommError(base::Cause::kJoinTimeout, "optimizer", rank, 0,
                          "the first rank of this host did not offer its shared memory in time");
  if (offer->front() == static_cast<char>(OfferKind::kError)) {
    const std::size_t end = offer->rfind('\n');
    throw base::CommError(base::Cause::kResource, "optimizer", rank, 0, offer->substr(1, end - 1),
                          offer->substr(end + 1));
  }
  base::net::FdMessage message = base::net::receive_fd(base::net::connect_abstract(offer->substr(1)).get(), deadline);
  if (message.label != bytes)
    throw base::CommError(base::Cause::kDesync, "optimizer", rank, 0,
                          "the first rank of this host allocated " + std::to_string(message.label) +
                              " shared bytes; expected " + std::to_string(bytes) + " on this rank");
  return SharedMemory::map(std::move(message.fd), bytes);
}

}  // namespace

SharedAllocation make_shared_allocation(job::Store& store, int rank, int size, std::size_t bytes, Deadline deadline) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t page_aligned_bytes = (bytes + page - 1) / page * page;
  try {
    auto memory = std::make_shared<SharedMemory>(rank == 0 ? create_or_report(store, size, page_aligned_bytes, deadline)
                                                           : receive(store, rank, page_aligned_bytes, deadline));
    memory->set_dumped(0, memory->size(), true);
    return {.memory = std::move(memory), .is_first = rank == 0};
  } catch (const base::SystemError& error) {
    throw base::CommError(error.cause(), "optimizer", rank, -1,
                          std::string("cannot share memory with the ranks of this host: ") + error.what(),
                          error.hint());
  }
}

}  // namespace lockstep::comm::shm
