#include "lockstep/job/health/heartbeat.h"

#include <chrono>

#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/base/thread.h"
#include "lockstep/base/timeouts.h"
#include "lockstep/job/fatal.h"

namespace lockstep::job::health {
namespace {

constexpr auto kStoreTimeout = std::chrono::seconds(5);

}  // namespace

Heartbeat::Heartbeat(std::shared_ptr<Store> store, int rank)
    : store_(std::move(store)), rank_(rank), thread_(base::start_thread_without_signals([this] { run(); })) {}

Heartbeat::~Heartbeat() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();  // bounded: a request to the store takes at most 10 s (Store)
}

void Heartbeat::run() {
  base::name_own_thread("beat");
  base::telemetry::RankPage& page = base::telemetry::RankPage::this_process();
  std::uint64_t last_published = 0;
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, base::kHeartbeatInterval, [this] { return stop_; })) {
    page.beat();
    const std::uint64_t progress = page.progress();
    if (!store_) continue;
    lock.unlock();
    try {
      // Access the store even without progress, so that a lost connection is replaced: the server reports a rank
      // without connections as ended.
      const auto limit = base::Deadline::in(kStoreTimeout);
      if (progress == last_published)
        store_->find(key::progress(rank_), limit);
      else
        store_->set(key::progress(rank_), std::to_string(progress), limit);
      last_published = progress;
    } catch (const std::exception&) {
      // Threads that need the store report its loss.
    }
    lock.lock();
  }
}

std::string read_progress(Store& store, const std::vector<int>& ranks, base::Deadline deadline) {
  std::string text;
  for (const int rank : ranks) text += store.find(key::progress(rank), deadline).value_or("-") + " ";
  return text;
}

}  // namespace lockstep::job::health
