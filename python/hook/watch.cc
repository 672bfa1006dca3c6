#include "python/hook/watch.h"

#include <unistd.h>

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>

#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/base/thread.h"
#include "lockstep/base/timeouts.h"

namespace {

using lockstep::base::telemetry::BlockedThread;
using lockstep::base::telemetry::RankPage;

/// A thread that calls RankPage::beat() once per second.
class Heartbeat {
 public:
  explicit Heartbeat(RankPage& page)
      : thread_(lockstep::base::start_thread_without_signals([&page, stop = stop_.get_token()] {
          lockstep::base::name_own_thread("beat");
          std::mutex mutex;
          std::unique_lock lock(mutex);
          std::condition_variable_any stopped;
          while (
              !stopped.wait_for(lock, stop, lockstep::base::kHeartbeatInterval, [&] { return stop.stop_requested(); }))
            page.beat();
        })) {}
  ~Heartbeat() {
    stop_.request_stop();
    thread_.join();  // bounded: beat() only writes to the page
  }
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

 private:
  std::stop_source stop_;
  std::thread thread_;  // last, because it uses the other member
};

struct Watch {
  RankPage& page;
  pid_t pid;
  int rank = -1;
  std::map<std::string, std::uint16_t> channels = {};
  std::map<std::uint64_t, std::unique_ptr<BlockedThread>> waits = {};  // operations that have begun and not ended
  std::unique_ptr<Heartbeat> heartbeat = {};
};

Watch* attached = nullptr;  // never freed, because threads of the interpreter may outlive its exit handlers

/// Returns the watch of this process; null in a forked child.
Watch* watch() { return attached && attached->pid == ::getpid() ? attached : nullptr; }

template <typename Function>
void guarded(const Function& function) noexcept {
  try {
    if (Watch* const own = watch()) function(*own);
  } catch (...) {  // such as a lack of memory or threads: the program goes on unwatched
  }
}

}  // namespace

int lockstep_watch_attach() {
  try {
    if (!attached && RankPage::has_agent()) attached = new Watch{RankPage::this_process(), ::getpid()};
  } catch (...) {
    return 0;
  }
  return watch() ? 1 : 0;
}

void lockstep_watch_join(int rank, int world_size, const char* job, const char* transport, int has_heartbeat) {
  guarded([&](Watch& own) {
    const bool is_published = own.page.is_published();
    if (is_published && (own.page.rank != rank || own.page.world_size != world_size)) return;
    if (is_published && own.rank < 0 && !has_heartbeat) return;  // by a program that uses Lockstep itself
    // Before the rank is shown: without a thread for the heartbeat it would count as stopped.
    if (has_heartbeat)
      own.heartbeat.reset();
    else if (!own.heartbeat)
      own.heartbeat = std::make_unique<Heartbeat>(own.page);
    own.rank = has_heartbeat ? -1 : rank;
    publish_to(own.page, {rank, world_size, job, transport});
    own.page.has_left = 0;
  });
}

void lockstep_watch_leave() {
  guarded([](Watch& own) {
    own.waits.clear();
    if (own.rank < 0) return;
    own.page.has_left = 1;
    own.heartbeat.reset();
  });
}

void lockstep_watch_uses_port(int port) {
  guarded([&](Watch& own) {
    for (auto& entry : own.page.tcp_ports)
      if (entry == 0 || entry == port) {
        entry = static_cast<std::uint16_t>(port);
        return;
      }
  });
}

void lockstep_watch_look(int is_pending) {
  thread_local bool is_named = false;
  if (!std::exchange(is_named, true)) lockstep::base::name_own_thread("watch");
  guarded([&](Watch& own) {
    own.page.looks.fetch_add(1, std::memory_order_relaxed);
    if (is_pending) own.page.pending_looks.fetch_add(1, std::memory_order_relaxed);
  });
}

void lockstep_watch_step() {
  guarded([](Watch& own) { own.page.steps.fetch_add(1, std::memory_order_relaxed); });
}

void lockstep_watch_batch() {
  guarded([](Watch& own) { own.page.batches.fetch_add(1, std::memory_order_relaxed); });
}

void lockstep_watch_alive() {
  guarded([](Watch& own) { own.page.alive_count.fetch_add(1, std::memory_order_relaxed); });
}

void lockstep_watch_handles(const char* exception) {
  guarded([&](Watch& own) {
    RankPage::ExceptionText handled{};
    lockstep::base::telemetry::copy_text(handled.text, exception);
    own.page.handles.store(handled);
  });
}

std::uint64_t lockstep_watch_begin(const char* channel, std::uint64_t seq, const char* kind, const char* dtype,
                                   std::uint64_t bytes) {
  std::uint64_t number = 0;
  guarded([&](Watch& own) {
    const auto found = own.channels.find(channel);
    const std::uint16_t index = found != own.channels.end()
                                    ? found->second
                                    : own.channels.emplace(channel, own.page.flight.add_channel(channel)).first->second;
    own.page.alive_count.fetch_sub(1, std::memory_order_relaxed);  // the next line counts progress, which a wait is not
    number = own.page.flight.begin(
        {.channel = index, .seq = seq, .kind = kind, .dtype = dtype, .bytes = bytes, .step = own.page.step()});
    own.waits[number] = std::make_unique<BlockedThread>(/*is_main=*/true);
  });
  return number;
}

void lockstep_watch_end(std::uint64_t number) {
  guarded([&](Watch& own) {
    if (number == 0) return;
    own.page.flight.end(number);
    own.waits.erase(number);  // if it has not left meanwhile
  });
}
