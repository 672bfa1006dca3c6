#include "lockstep/job/health/heartbeat.h"

#include <pthread.h>
#include <signal.h>

#include <chrono>

#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/job/fatal.h"

namespace lockstep::job {
namespace {

constexpr auto kBeat = std::chrono::seconds(1);
constexpr auto kStoreLimit = std::chrono::seconds(5);

/// A thread that is made now takes no signal: those are for the program's own.
std::thread without_signals(auto&& run) {
  sigset_t all, before;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread(run);
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

}  // namespace

Heartbeat::Heartbeat(std::shared_ptr<Store> store, int rank)
    : store_(std::move(store)), rank_(rank), thread_(without_signals([this] { run(); })) {}

Heartbeat::~Heartbeat() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();  // bounded: by the store's patience
}

void Heartbeat::run() {
  base::RankPage& page = base::RankPage::process();
  std::uint64_t told = 0;
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kBeat, [this] { return stop_; })) {
    page.beats.fetch_add(1, std::memory_order_relaxed);
    if (page.busy.load(std::memory_order_relaxed) > 0) page.alive.fetch_add(1, std::memory_order_relaxed);
    const std::uint64_t progress = page.progress();
    if (!store_) continue;
    lock.unlock();
    try {
      // A rank of which the store hears nothing has ended: one that has lost its connections gets a new one so.
      const auto limit = base::Deadline::in(kStoreLimit);
      if (progress == told)
        store_->find(key::progress(rank_), limit);
      else
        store_->set(key::progress(rank_), std::to_string(progress), limit);
      told = progress;
    } catch (const std::exception&) {
      // Who needs the store notices it, and says so.
    }
    lock.lock();
  }
}

std::string progress_of(Store& store, const std::vector<int>& ranks, base::Deadline deadline) {
  std::string all;
  for (const int rank : ranks) all += store.find(key::progress(rank), deadline).value_or("-") + " ";
  return all;
}

}  // namespace lockstep::job
