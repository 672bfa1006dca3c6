#include "lockstep/comm/channel/deadlock_detector.h"

#include <unistd.h>

#include <algorithm>
#include <optional>
#include <thread>

#include "lockstep/base/parse.h"
#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/comm/channel/serial_executor.h"
#include "lockstep/job/fatal.h"
#include "lockstep/job/health/heartbeat.h"

namespace lockstep::comm {
namespace {

using base::Cause;
using base::CommError;
using base::Deadline;
using base::DesyncError;
using base::PeerLostError;
using base::TimeoutError;

constexpr char kFieldSeparator = '\x1f';
constexpr auto kStoreLimit = std::chrono::seconds(5);
constexpr auto kPause = std::chrono::milliseconds(10);
constexpr auto kPollOverdue = std::chrono::seconds(5);  // there is one every second, and a busy store may hold it up
// A wait publishes itself within 200 ms: after this, whoever came before it began to wait has said so.
constexpr auto kPeersPublishTime = std::chrono::milliseconds(300);
constexpr auto kLauncherVerdictTime = std::chrono::milliseconds(500);
constexpr std::string_view kExitedCleanly = "exited with code 0";
constexpr const char* kUnevenHint =
    "give every rank the same number of batches, or put the loop under lockstep::join()";

Deadline soon() { return Deadline::in(kStoreLimit); }
std::string wait_key(int rank) { return "wait/" + std::to_string(rank); }
std::string describe_exit(int rank, const std::string& how) {
  return "rank " + std::to_string(rank) +
         (how.starts_with("killed ")                                ? " was "
          : how.starts_with("exited ") || how.starts_with("ended ") ? " "
                                                                    : ": ") +
         how;
}
std::string join_ranks(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ",") + std::to_string(rank);
  return text;
}
std::string abandoned_key(const std::string& channel) { return "abandoned/" + channel; }

}  // namespace

/// What a rank published: the wait that blocks it (channel is empty when there is none), and how far it has come on
/// each channel.
struct DeadlockDetector::PeerRecord {
  std::string beat;
  std::string channel;
  std::uint64_t seq = 0;
  std::string text;
  std::string members;
  std::map<std::string, std::uint64_t> started;

  static std::optional<PeerRecord> parse(const std::string& record) {
    const auto lines = base::split(record, '\n');
    const auto head = base::split(lines[0], kFieldSeparator);
    if (head.size() != 5) return std::nullopt;
    PeerRecord peer{head[0], head[1], static_cast<std::uint64_t>(base::parse_int(head[2]).value_or(0)),
                    head[3], head[4], {}};
    for (std::size_t i = 1; i < lines.size(); ++i) {
      const auto pair = base::split(lines[i], kFieldSeparator);
      if (pair.size() == 2) peer.started[pair[0]] = static_cast<std::uint64_t>(base::parse_int(pair[1]).value_or(0));
    }
    return peer;
  }

  bool has_started(const std::string& channel_name, std::uint64_t number) const {
    const auto found = started.find(channel_name);
    return found != started.end() && found->second >= number;
  }
  std::vector<int> awaited() const {
    std::vector<int> ranks;
    for (const std::string& rank : base::split(members, ','))
      if (const auto number = base::parse_int(rank)) ranks.push_back(static_cast<int>(*number));
    return ranks;
  }
  bool waits_for(int rank) const {
    const auto ranks = awaited();
    return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
  }
};

DeadlockDetector::DeadlockDetector(std::shared_ptr<job::Store> store, int rank, std::string host,
                                   std::chrono::milliseconds limit, std::vector<int> remote_ranks)
    : store_(std::move(store)),
      rank_(rank),
      host_(std::move(host)),
      progress_limit_(limit),
      remote_ranks_(std::move(remote_ranks)) {}

DeadlockDetector::StartCounter& DeadlockDetector::start_counter(const std::string& channel) {
  const std::lock_guard lock(mutex_);
  return start_counters_[channel];
}

void DeadlockDetector::add_starting_thread() {
  if (is_background_thread_) return;
  const std::lock_guard lock(mutex_);
  starting_threads_.insert(acting_thread());
  last_starting_thread_.store(acting_thread(), std::memory_order_relaxed);
}

DeadlockDetector::ExecutorWait::ExecutorWait(DeadlockDetector& deadlock_detector, const SerialExecutor* executor,
                                             PendingPtr pending)
    : deadlock_detector_(deadlock_detector) {
  if (is_background_thread_) return;
  const std::lock_guard lock(deadlock_detector_.mutex_);
  deadlock_detector_.executor_waited_for_ = executor;
  deadlock_detector_.pending_waited_for_ = std::move(pending);
}

DeadlockDetector::ExecutorWait::~ExecutorWait() {
  if (is_background_thread_) return;
  const std::lock_guard lock(deadlock_detector_.mutex_);
  deadlock_detector_.executor_waited_for_ = nullptr;
  deadlock_detector_.pending_waited_for_ = nullptr;
}

/// Whether the wait of this thread keeps the process from starting anything else.
bool DeadlockDetector::is_blocked_locked() const {
  if (starting_threads_.size() != 1 || is_background_thread_) return false;
  if (!SerialExecutor::current()) return starting_threads_.contains(acting_thread());
  return executor_waited_for_ == SerialExecutor::current() && !pending_waited_for_->done();
}

/// With mutex_ held.
std::string DeadlockDetector::record() {
  std::string text = std::to_string(beat_) + kFieldSeparator +
                     (blocking_wait_.empty() ? std::string(3, kFieldSeparator) : blocking_wait_);
  for (const auto& [channel, seq] : start_counters_)
    text += "\n" + channel + kFieldSeparator + std::to_string(seq.load(std::memory_order_acquire));
  return text;
}

void DeadlockDetector::publish_record(const WaitInfo& waiting, Looks& poll_state) {
  std::string text;
  {
    const std::lock_guard lock(mutex_);
    const bool blocked = is_blocked_locked();
    if (blocked) {
      ++beat_;
      blocking_wait_ = waiting.channel + kFieldSeparator + std::to_string(waiting.seq) + kFieldSeparator +
                       waiting.text + kFieldSeparator;
      for (const int member : *waiting.members) blocking_wait_ += std::to_string(member) + ",";
    } else if (poll_state.blocked) {
      blocking_wait_.clear();
    }
    if (!blocked) poll_state.peer_beats.clear();
    poll_state.blocked = blocked;
    base::RankPage::this_process().waiting.store(!blocking_wait_.empty(), std::memory_order_relaxed);
    text = record();
  }
  store_->set(wait_key(rank_), text, patience(waiting));
  poll_state.published = true;
}

void DeadlockDetector::poll(const WaitInfo& waiting, Looks& poll_state) {
  try {
    poll_store(waiting, poll_state);
  } catch (const CommError& error) {
    if (error.cause() == Cause::kPeerUnreachable && error.op() == "store") throw_store_unreachable(waiting, error);
    throw;
  }
}

/// This host is cut off: as far as it can tell from all others.
void DeadlockDetector::throw_store_unreachable(const WaitInfo& waiting, const CommError& error) {
  const std::string remote_ranks =
      remote_ranks_.empty() ? "" : "; the ranks of other hosts, out of reach: " + join_ranks(remote_ranks_);
  throw PeerLostError(error.cause(), waiting.label, rank_, remote_ranks_.empty() ? -1 : remote_ranks_.front(),
                      waiting.label + ": " + error.what() + remote_ranks, error.hint());
}

void DeadlockDetector::poll_store(const WaitInfo& waiting, Looks& poll_state) {
  throw_first_cause(waiting);
  throw_if_abandoned(waiting);
  publish_record(waiting, poll_state);
  for (const int peer : *waiting.members) {
    if (peer == rank_) continue;
    check_exited(waiting, peer, false);
    check_left(waiting, peer);
    check_closed(waiting, peer, poll_state);
    if (poll_state.blocked) check_peer(waiting, peer, poll_state);
  }
  check_progress(waiting, poll_state);
}

bool DeadlockDetector::job_has_failed() {
  return base::RankPage::this_process().stop_requested.load(std::memory_order_relaxed) != 0;
}

void DeadlockDetector::check_progress(const WaitInfo& waiting, Looks& poll_state) {
  if (progress_limit_.count() == 0) return;
  const auto now = Deadline::Clock::now();
  if (poll_state.last_progress == Deadline::Clock::time_point{}) poll_state.last_progress = poll_state.last_poll = now;
  // Time in which this rank itself stood still does not count.
  if (now - poll_state.last_poll > kPollOverdue) poll_state.last_progress += now - poll_state.last_poll;
  poll_state.last_poll = now;
  std::string progress = read_awaited_progress(waiting);
  if (progress != poll_state.progress) {
    poll_state.progress = std::move(progress);
    poll_state.last_progress = now;
  }
  if (now - poll_state.last_progress >= progress_limit_) throw_timeout(waiting, poll_state);
}

/// Of those that have not come, and of those that they wait for in turn; of all when all have come, and move what is
/// much.
std::string DeadlockDetector::read_awaited_progress(const WaitInfo& waiting) {
  std::vector<int> ranks = find_absent_ranks(waiting);
  if (ranks.empty()) ranks = *waiting.members;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const auto other = read_peer_record(wait_key(ranks[i]), waiting);
    if (!other || other->channel.empty()) continue;
    for (const int next : other->awaited())
      if (std::find(ranks.begin(), ranks.end(), next) == ranks.end()) ranks.push_back(next);
  }
  std::sort(ranks.begin(), ranks.end());
  std::string who;
  for (const int rank : ranks) who += std::to_string(rank) + " ";
  return who + job::read_progress(*store_, ranks, patience(waiting));
}

void DeadlockDetector::end(Looks& poll_state) noexcept {
  if (!poll_state.published) return;
  poll_state.published = false;
  try {
    std::string text;
    {
      const std::lock_guard lock(mutex_);
      if (poll_state.blocked) blocking_wait_.clear();
      base::RankPage::this_process().waiting.store(!blocking_wait_.empty(), std::memory_order_relaxed);
      text = record();
    }
    store_->set(wait_key(rank_), text, soon());
  } catch (const std::exception&) {
    // A store that is gone is noticed by the next operation that needs it.
  }
}

/// A store that stands still, as when a person has stopped the launcher, is waited for as long as a rank is.
Deadline DeadlockDetector::patience(const WaitInfo& waiting) const {
  return earlier(waiting.deadline,
                 progress_limit_.count() > 0 ? Deadline::in(progress_limit_)
                                             : Deadline::never());  // bounded: as the user wants it
}

std::optional<DeadlockDetector::PeerRecord> DeadlockDetector::read_peer_record(const std::string& key,
                                                                               const WaitInfo& waiting) {
  const auto text = store_->find(key, patience(waiting));
  return text ? PeerRecord::parse(*text) : std::nullopt;
}

void DeadlockDetector::throw_first_cause(const WaitInfo& waiting) {
  const auto line = store_->find(job::key::kCause, patience(waiting));
  const auto cause = line ? job::parse_fatal(*line) : std::nullopt;
  if (!cause) return;
  const bool ended = cause->cause == Cause::kRankDied || cause->cause == Cause::kRankExited;
  const std::string text = waiting.label + ": " + (ended ? describe_exit(cause->rank, cause->detail) : cause->detail);
  if (ended || cause->cause == Cause::kPeerUnreachable)
    throw PeerLostError(cause->cause, waiting.label, rank_, cause->rank, text, cause->hint);
  if (cause->cause == Cause::kDesync)
    throw DesyncError(cause->cause, waiting.label, rank_, cause->rank, text, cause->hint);
  if (cause->cause == Cause::kRankStuck)
    throw TimeoutError(cause->cause, waiting.label, rank_, cause->rank, text, cause->hint);
  throw CommError(cause->cause, waiting.label, rank_, cause->rank, text, cause->hint);
}

void DeadlockDetector::throw_if_abandoned(const WaitInfo& waiting) {
  const auto record = store_->find(abandoned_key(waiting.channel), patience(waiting));
  if (!record) return;
  const std::size_t end = record->find(kFieldSeparator);
  const auto peer = base::parse_int(std::string_view(*record).substr(0, end));
  throw PeerLostError(Cause::kPeerUnreachable, waiting.label, rank_, static_cast<int>(peer.value_or(-1)),
                      waiting.label + ": " + record->substr(std::min(end, record->size() - 1) + 1));
}

void DeadlockDetector::abandon(const std::string& channel, int peer, const std::string& text) noexcept {
  try {
    store_->compare_set(abandoned_key(channel), "", std::to_string(peer) + kFieldSeparator + text, soon());
  } catch (const std::exception&) {
    // The others' waits end at their deadline.
  }
}

void DeadlockDetector::check_left(const WaitInfo& waiting, int peer) {
  const auto record = read_peer_record(job::key::left(peer), waiting);
  if (!record || record->has_started(waiting.channel, waiting.seq)) return;
  throw_first_cause(waiting);  // who leaves because of an error has published it before
  throw CommError(Cause::kUnevenInput, waiting.label, rank_, peer,
                  "rank " + std::to_string(peer) + " finished while rank " + std::to_string(rank_) +
                      " waits for it in " + waiting.text,
                  kUnevenHint);
}

/// A process that has ended will not come. `accept_clean_exit`: one that returned 0 may have done its part before,
/// which only a wire that failed rules out.
void DeadlockDetector::check_exited(const WaitInfo& waiting, int peer, bool accept_clean_exit) {
  const auto how = store_->find(job::key::exited(peer), patience(waiting));
  if (!how || how->empty() || (*how == job::key::kClosedWithoutCause && !accept_clean_exit)) return;
  throw_first_cause(waiting);
  if (*how == job::key::kClosedWithoutCause) {
    check_left(waiting, peer);
    if (read_peer_record(job::key::left(peer), waiting)) return;
  }
  if (*how != kExitedCleanly) {
    // The launcher is about to say which of those that end now was the first.
    for (const Deadline told = Deadline::in(kLauncherVerdictTime); !told.expired(); std::this_thread::sleep_for(kPause))
      throw_first_cause(waiting);
    throw PeerLostError(Cause::kPeerUnreachable, waiting.label, rank_, peer,
                        waiting.label + ": " + describe_exit(peer, *how));
  }
  if (!accept_clean_exit) return;
  check_left(waiting, peer);  // says it better, and knows of a part that was done
  if (!read_peer_record(job::key::left(peer), waiting))
    throw CommError(Cause::kUnevenInput, waiting.label, rank_, peer,
                    "rank " + std::to_string(peer) + " ended while rank " + std::to_string(rank_) +
                        " waits for it in " + waiting.text,
                    kUnevenHint);
}

/// A process of which only that it ended is known may have done its part before, or may have lost no more than its
/// connections.
void DeadlockDetector::check_closed(const WaitInfo& waiting, int peer, Looks& poll_state) {
  const auto how = store_->find(job::key::exited(peer), patience(waiting));
  if (!how || *how != job::key::kClosedWithoutCause || read_peer_record(job::key::left(peer), waiting)) {
    poll_state.closed.erase(peer);
    return;
  }
  const auto now = Deadline::Clock::now();
  const auto since = poll_state.closed.try_emplace(peer, now).first->second;
  if (now - since < job::kReconnectGrace) return;
  throw_first_cause(waiting);
  throw PeerLostError(Cause::kPeerUnreachable, waiting.label, rank_, peer,
                      waiting.label + ": " + describe_exit(peer, *how));
}

void DeadlockDetector::check_peer(const WaitInfo& waiting, int peer, Looks& poll_state) {
  const auto other = read_peer_record(wait_key(peer), waiting);
  if (!other) return;
  const bool same = other->channel == waiting.channel && other->seq == waiting.seq;
  if (same || other->has_started(waiting.channel, waiting.seq) || !other->waits_for(rank_)) return;
  {
    const std::lock_guard lock(mutex_);
    const auto mine = start_counters_.find(other->channel);
    if (mine != start_counters_.end() && mine->second >= other->seq) return;
  }
  const auto [before, first] = poll_state.peer_beats.try_emplace(peer, other->beat);
  poll_state.soon |= first;
  if (first || before->second == other->beat) return;
  const bool lower = rank_ < peer;
  const std::string here = "rank " + std::to_string(rank_) + " called " + waiting.text;
  const std::string there = "rank " + std::to_string(peer) + " called " + other->text;
  throw DesyncError(Cause::kDesync, waiting.label, rank_, peer, lower ? here + ", " + there : there + ", " + here,
                    "every rank must make the same calls in the same order: look for a call inside 'if (rank == 0)'");
}

std::vector<int> DeadlockDetector::find_absent_ranks(const WaitInfo& waiting) {
  std::vector<int> ranks;
  for (const int peer : *waiting.members) {
    if (peer == rank_) continue;
    const auto other = read_peer_record(wait_key(peer), waiting);
    if (!other || !other->has_started(waiting.channel, waiting.seq)) ranks.push_back(peer);
  }
  return ranks;
}

void DeadlockDetector::throw_timeout(const WaitInfo& waiting, Looks& poll_state) {
  // The others may have waited as shortly as this rank: all say that they came before anybody is named.
  const Deadline told = Deadline::in(poll_state.published ? std::chrono::milliseconds(0) : kPeersPublishTime);
  publish_record(waiting, poll_state);
  std::vector<int> missing = find_absent_ranks(waiting);
  while (!missing.empty() && !told.expired()) {
    std::this_thread::sleep_for(kPause);
    missing = find_absent_ranks(waiting);
  }
  std::vector<int> came;
  for (const int peer : *waiting.members)
    if (peer != rank_ && std::find(missing.begin(), missing.end(), peer) == missing.end()) came.push_back(peer);
  throw TimeoutError(
      Cause::kRankStuck, waiting.label, rank_, missing.empty() ? -1 : missing.front(),
      "no end of " + waiting.text + " before its deadline; " +
          (missing.empty() ? std::string("all ranks have come") : "ranks that have not come: " + join_ranks(missing)) +
          (came.empty() ? "" : "; ranks that wait too: " + join_ranks(came)),
      "long work on one rank goes under world.busy(); LOCKSTEP_TIMEOUT or InitOptions.timeout sets how long a rank "
      "waits for others that "
      "do not get on");
}

void DeadlockDetector::throw_transport_failure(const WaitInfo& waiting, const std::string& text,
                                               const std::string& hint) {
  // A peer's process that ended is announced by the launcher, a peer that left by itself: both within moments. How a
  // process ended outranks that it left its world before, as one does that returns an error from main().
  const Deadline limit = Deadline::in(std::chrono::seconds(1));
  const Deadline left_counts = Deadline::in(kPeersPublishTime);
  for (;;) {
    throw_first_cause(waiting);
    throw_if_abandoned(waiting);  // who gives up a channel may have ended since
    for (const int peer : *waiting.members) {
      if (peer == rank_) continue;
      check_exited(waiting, peer, true);
      if (left_counts.expired()) check_left(waiting, peer);
    }
    if (limit.expired()) break;
    std::this_thread::sleep_for(kPause);
  }
  throw PeerLostError(Cause::kPeerUnreachable, waiting.label, rank_, -1,
                      waiting.label + ": the connection to another rank ended: " + text +
                          (remote_ranks_.empty() ? "" : "; on other hosts are ranks " + join_ranks(remote_ranks_)),
                      hint);
}

void DeadlockDetector::publish_failure(const CommError& error) noexcept {
  // The loss of a peer is a consequence: what happened to the peer is the cause, and the launcher knows it.
  if (error.cause() == Cause::kPeerUnreachable || error.cause() == Cause::kCoordinatorLost) return;
  const bool peer_at_fault = error.peer() >= 0;
  job::Fatal fatal;
  fatal.cause = error.cause();
  fatal.rank = peer_at_fault ? error.peer() : rank_;
  if (fatal.rank == rank_) {
    fatal.host = host_;
    fatal.pid = ::getpid();
  }
  fatal.op = error.op();
  fatal.detail = error.what();
  fatal.hint = error.hint();
  job::publish_cause(*store_, fatal);
}

void DeadlockDetector::publish_failure(Cause cause, const std::string& text, const std::string& hint) noexcept {
  const std::int64_t step = base::RankPage::this_process().step();
  job::publish_cause(
      *store_,
      {.cause = cause, .rank = rank_, .host = host_, .pid = ::getpid(), .step = step, .detail = text, .hint = hint});
}

void DeadlockDetector::leave() noexcept {
  try {
    std::string text;
    {
      const std::lock_guard lock(mutex_);
      blocking_wait_.clear();
      base::RankPage::this_process().has_left.store(1, std::memory_order_relaxed);
      text = record();
    }
    store_->set(job::key::left(rank_), text, Deadline::in(std::chrono::seconds(1)));
  } catch (const std::exception&) {
    // Nobody is left to be told.
  }
}

}  // namespace lockstep::comm
