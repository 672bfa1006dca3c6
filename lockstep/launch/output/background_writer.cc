#include "lockstep/launch/output/background_writer.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <set>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "lockstep/base/thread.h"

namespace lockstep::launcher::output {

struct BackgroundWriter::Shared {
  const std::size_t limit;
  const int failure_fd;
  mutable std::mutex mutex;  // guards all members below
  std::condition_variable changed;
  std::deque<WriterEntry> queue;
  std::shared_ptr<void> receipt;  // of the entry that is being written
  std::size_t queued_bytes = 0;
  std::uint64_t progress = 0;                         // number of writes
  base::Deadline::Clock::time_point last_progress{};  // of the last write, or of the first entry after a pause
  std::int64_t dropped = 0;
  bool busy = false;
  bool closing = false;
  int error = 0;
  std::set<int> failed;

  Shared(std::size_t limit_bytes, int failures) : limit(limit_bytes), failure_fd(failures) {}

  /// Drops the oldest entries until at most `max_bytes` are queued.
  void drop_oldest(std::size_t max_bytes) {
    for (auto entry = queue.begin(); entry != queue.end() && queued_bytes > max_bytes;) {
      if (entry->keep) {
        ++entry;
        continue;
      }
      queued_bytes -= entry->bytes.size();
      dropped += entry->lines;
      entry = queue.erase(entry);
    }
  }

  /// Blocks until there is an entry. Returns false once the BackgroundWriter has been destroyed.
  bool take(WriterEntry& entry) {
    std::unique_lock lock(mutex);
    busy = false;
    receipt.reset();
    changed.notify_all();
    // bounded: the destructor of BackgroundWriter sets closing and notifies
    base::wait_until(changed, lock, base::Deadline::never(), [&] { return closing || !queue.empty(); });
    if (closing) return false;
    entry = std::move(queue.front());
    queue.pop_front();
    queued_bytes -= entry.bytes.size();
    receipt = std::move(entry.receipt);
    busy = true;
    if (failed.contains(entry.fd)) entry.bytes.clear();
    return true;
  }

  void put(const WriterEntry& entry) {
    for (std::size_t done = 0; done < entry.bytes.size();) {
      const ssize_t size =
          ::write(entry.fd, entry.bytes.data() + done, std::min<std::size_t>(entry.bytes.size() - done, 8192));
      const int write_error = size < 0 ? errno : 0;
      if (write_error == EAGAIN) {
        // Another process has made our terminal non-blocking. This loop may run until the process ends: no other thread
        // waits for this one.
        pollfd writable{entry.fd, POLLOUT, 0};
        ::poll(&writable, 1, 1000);
        continue;
      }
      if (write_error == EINTR) continue;
      const std::lock_guard lock(mutex);
      if (write_error != 0) {
        if (error == 0) error = write_error;
        failed.insert(entry.fd);
        if (failure_fd >= 0 && !closing) ::eventfd_write(failure_fd, 1);
        return;
      }
      done += static_cast<std::size_t>(size);
      ++progress;
      last_progress = base::Deadline::Clock::now();
      changed.notify_all();
    }
  }
};

BackgroundWriter::BackgroundWriter(std::size_t limit, int failure_fd)
    : shared_(std::make_shared<Shared>(limit, failure_fd)) {}

BackgroundWriter::~BackgroundWriter() {
  bool busy = false;
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->closing = true;
    shared_->changed.notify_all();
    busy = shared_->busy;
  }
  if (!thread_.joinable()) return;
  if (busy)
    thread_.detach();
  else
    thread_.join();  // bounded: the thread is between two entries, where it checks closing
}

void BackgroundWriter::write(WriterEntry entry) {
  if (entry.bytes.empty()) return;
  if (!thread_.joinable())
    thread_ = base::start_thread([shared = shared_] {
      WriterEntry next;
      while (shared->take(next)) shared->put(next);
    });
  const std::lock_guard lock(shared_->mutex);
  if (!shared_->busy && shared_->queue.empty()) shared_->last_progress = base::Deadline::Clock::now();
  shared_->queued_bytes += entry.bytes.size();
  shared_->queue.push_back(std::move(entry));
  if (shared_->queued_bytes > shared_->limit) shared_->drop_oldest(shared_->limit);
  shared_->changed.notify_all();
}

bool BackgroundWriter::drop_if_stalled(std::chrono::milliseconds stall_limit) {
  const std::lock_guard lock(shared_->mutex);
  const bool idle = shared_->queue.empty() && !shared_->busy;
  if (idle || base::Deadline::Clock::now() - shared_->last_progress < stall_limit) return false;
  shared_->drop_oldest(0);
  shared_->receipt.reset();
  return true;
}

bool BackgroundWriter::drain(std::chrono::milliseconds stall_limit, std::chrono::milliseconds total_limit) {
  const base::Deadline end = base::Deadline::in(total_limit);
  std::unique_lock lock(shared_->mutex);
  const auto empty = [&] { return shared_->queue.empty() && !shared_->busy; };
  while (!empty()) {
    const std::uint64_t before = shared_->progress;
    const base::Deadline pause = earlier(base::Deadline::in(stall_limit), end);
    if (!shared_->changed.wait_until(lock, pause.when(), [&] { return empty() || shared_->progress != before; }))
      return false;
    if (end.expired()) return empty();
  }
  return true;
}

std::int64_t BackgroundWriter::dropped() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->dropped;
}

int BackgroundWriter::error() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->error;
}

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
