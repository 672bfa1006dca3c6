#include "lockstep/launch/output/output_acks.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <mutex>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"

namespace lockstep::launcher::output {

struct OutputAcks::Shared {
  const std::size_t threshold;
  const base::Fd event{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  std::mutex mutex;                  // guards the members below
  std::vector<std::size_t> written;  // of each stream: bytes since its last acknowledgement; index 2 * rank + stream
  bool is_due = false;               // one of them has reached the threshold

  Shared(std::size_t num_ranks, std::size_t window) : threshold(window / 2), written(2 * num_ranks) {
    if (!event) throw base::SystemError("eventfd", errno);
  }

  void add(std::size_t index, std::size_t bytes) {
    const std::lock_guard lock(mutex);
    written[index] += bytes;
    if (written[index] >= threshold && !std::exchange(is_due, true)) ::eventfd_write(event.get(), 1);
  }
};

OutputAcks::OutputAcks(std::size_t num_ranks, std::size_t window)
    : shared_(std::make_shared<Shared>(num_ranks, window)) {}

std::shared_ptr<void> OutputAcks::receipt(int rank, Stream stream, std::size_t bytes) {
  const std::size_t index = 2 * static_cast<std::size_t>(rank) + static_cast<std::size_t>(stream);
  return {nullptr, [shared = shared_, index, bytes](void*) { shared->add(index, bytes); }};
}

int OutputAcks::fd() const { return shared_->event.get(); }

std::vector<OutputAck> OutputAcks::take() {
  std::vector<OutputAck> acks;
  const std::lock_guard lock(shared_->mutex);
  std::uint64_t count = 0;
  [[maybe_unused]] const auto size = ::read(shared_->event.get(), &count, sizeof count);
  shared_->is_due = false;
  for (std::size_t index = 0; index < shared_->written.size(); ++index)
    if (shared_->written[index] > 0 && shared_->written[index] >= shared_->threshold)
      acks.push_back({static_cast<int>(index / 2), index % 2 == 0 ? Stream::kOut : Stream::kErr,
                      std::exchange(shared_->written[index], 0)});
  return acks;
}

}  // namespace lockstep::launcher::output
