#include "lockstep/comm/channel/deadlock_detector.h"

#include <unistd.h>

#include <algorithm>
#include <optional>
#include <thread>

#include "lockstep/base/net/socket.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/base/timeouts.h"
#include "lockstep/comm/channel/host_watch.h"
#include "lockstep/comm/channel/serial_executor.h"
#include "lockstep/job/exit_record.h"
#include "lockstep/job/fatal.h"
#include "lockstep/job/health/heartbeat.h"

namespace lockstep::comm::channel {
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
constexpr job::ExitRecord kCleanExit{job::ExitKind::kCode, 0};
constexpr const char* kUnevenHint =
    "give every rank the same number of batches, or put the loop under lockstep::join(); or the rank has exited with "
    "an error";

Deadline store_deadline() { return Deadline::in(kStoreLimit); }
std::string wait_key(int rank) { return "wait/" + std::to_string(rank); }
std::string describe_exit(int rank, const job::ExitRecord& how) {
  return "rank " + std::to_string(rank) + (how.kind == job::ExitKind::kSignal ? " was " : " ") + describe(how);
}
/// Returns the detail of a published failure as a sentence about `rank`. A launcher's detail begins with what
/// describe() returns; a rank's own detail is a message.
std::string describe_failure(int rank, const std::string& detail) {
  return "rank " + std::to_string(rank) +
         (detail.starts_with("killed ")   ? " was "
          : detail.starts_with("exited ") ? " "
                                          : ": ") +
         detail;
}
/// The main thread, which usually loads this library; else none.
const std::thread::id main_thread =
    base::telemetry::BlockedThread::is_main_thread() ? std::this_thread::get_id() : std::thread::id();
std::string abandoned_key(const std::string& channel) { return "abandoned/" + channel; }

}  // namespace

DeadlockDetector::DeadlockDetector(std::shared_ptr<job::Store> store, int rank, std::string host,
                                   std::chrono::milliseconds limit, std::vector<int> remote_ranks)
    : store_(std::move(store)),
      rank_(rank),
      host_(std::move(host)),
      progress_limit_(limit),
      remote_ranks_(std::move(remote_ranks)) {}

DeadlockDetector::~DeadlockDetector() = default;

void DeadlockDetector::watch_hosts(std::unique_ptr<HostWatch> host_watch) { host_watch_ = std::move(host_watch); }

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

/// Returns whether the wait of this thread keeps the process from starting other operations. Requires mutex_ to be
/// held.
bool DeadlockDetector::is_blocked_locked() const {
  if (starting_threads_.size() != 1 || is_background_thread_) return false;
  if (!SerialExecutor::current()) return starting_threads_.contains(acting_thread());
  return executor_waited_for_ == SerialExecutor::current() && !pending_waited_for_->done();
}

void DeadlockDetector::show_blocked(std::optional<base::telemetry::BlockedThread>& blocked) {
  if (blocked || is_background_thread_ || (SerialExecutor::current() && !is_device_thread_)) return;
  const bool is_main = acting_for_ ? *acting_for_ == main_thread || main_thread == std::thread::id()
                                   : base::telemetry::BlockedThread::is_main_thread();
  blocked.emplace(is_device_thread_ || is_main);
}

/// Returns the text of this rank's WaitRecord. Requires mutex_ to be held.
std::string DeadlockDetector::record() {
  WaitRecord record = blocking_wait_.value_or(WaitRecord());
  record.beat = beat_;
  for (const auto& [channel, seq] : start_counters_) record.started[channel] = seq.load(std::memory_order_acquire);
  return record.to_text();
}

void DeadlockDetector::publish_record(const WaitInfo& wait_info, PollState& poll_state) {
  std::string text;
  {
    const std::lock_guard lock(mutex_);
    const bool blocked = is_blocked_locked();
    if (blocked) {
      ++beat_;
      blocking_wait_ = {.channel = wait_info.channel,
                        .seq = wait_info.seq,
                        .text = wait_info.text,
                        .awaited = *wait_info.members,
                        .any_member = wait_info.any_member,
                        .hint = std::string(wait_info.hint)};
    } else if (poll_state.is_blocking) {
      blocking_wait_.reset();
    }
    if (!blocked) poll_state.peer_beats.clear();
    poll_state.is_blocking = blocked;
    text = record();
  }
  show_blocked(poll_state.blocked);
  store_->set(wait_key(rank_), text, store_limit(wait_info));
  poll_state.is_published = true;
}

void DeadlockDetector::poll(const WaitInfo& wait_info, PollState& poll_state) {
  try {
    poll_store(wait_info, poll_state);
  } catch (const CommError& error) {
    if (error.cause() != Cause::kPeerUnreachable || error.op() != "store") throw;
    // The store cannot be reached: from this host, all other hosts appear lost.
    const std::string remote_ranks =
        remote_ranks_.empty() ? "" : "; unreachable ranks on other hosts: " + base::joined(remote_ranks_, ",");
    throw PeerLostError(error.cause(), wait_info.label, rank_, remote_ranks_.empty() ? -1 : remote_ranks_.front(),
                        wait_info.label + ": " + error.what() + remote_ranks, error.hint());
  }
}

void DeadlockDetector::poll_store(const WaitInfo& wait_info, PollState& poll_state) {
  throw_first_cause(wait_info);
  throw_if_abandoned(wait_info);
  publish_record(wait_info, poll_state);
  for (const int peer : *wait_info.members) {
    if (peer == rank_) continue;
    check_exited(wait_info, peer, false);
    if (!wait_info.any_member) check_left(wait_info, peer);
    check_closed(wait_info, peer, poll_state);
    if (poll_state.is_blocking && !wait_info.any_member) check_peer(wait_info, peer, poll_state);
  }
  if (wait_info.any_member) check_all_left(wait_info, poll_state);
  check_hosts(wait_info);
  check_progress(wait_info, poll_state);
}

void DeadlockDetector::check_hosts(const WaitInfo& wait_info) {
  const auto lost = host_watch_ ? host_watch_->check(*wait_info.members) : std::nullopt;
  if (!lost) return;
  throw_first_cause(wait_info);  // of a host that the launcher has lost as well
  const std::string detail = "host " + host_ + " has received no packet from host " + lost->name + " (" +
                             lost->address + ") for " + base::net::host_timeout_text() +
                             ", although both reach the job's store; on " + lost->name + " are ranks " +
                             base::joined(lost->ranks, ",");
  const std::string hint =
      "check the network and the firewalls between these two hosts; lockstep run --host-timeout tolerates longer cuts";
  job::publish_cause(*store_, {.cause = Cause::kPeerUnreachable,
                               .rank = lost->ranks.front(),
                               .host = lost->name,
                               .step = base::telemetry::RankPage::this_process().step(),
                               .op = wait_info.label,
                               .detail = detail,
                               .hint = hint});
  throw PeerLostError(Cause::kPeerUnreachable, wait_info.label, rank_, lost->ranks.front(),
                      wait_info.label + ": " + detail, hint);
}

bool DeadlockDetector::job_has_failed() {
  return base::telemetry::RankPage::this_process().stop_requested.load(std::memory_order_relaxed) != 0;
}

void DeadlockDetector::check_progress(const WaitInfo& wait_info, PollState& poll_state) {
  if (progress_limit_.count() == 0) return;
  const auto now = Deadline::Clock::now();
  if (poll_state.last_progress == Deadline::Clock::time_point{}) poll_state.last_progress = poll_state.last_poll = now;
  // Time in which this rank itself was stopped does not count.
  if (now - poll_state.last_poll > base::kPollOverdue) poll_state.last_progress += now - poll_state.last_poll;
  poll_state.last_poll = now;
  std::string progress = read_awaited_progress(wait_info);
  if (progress != poll_state.progress) {
    poll_state.progress = std::move(progress);
    poll_state.last_progress = now;
  }
  if (now - poll_state.last_progress >= progress_limit_) throw_timeout(wait_info, poll_state);
}

/// Returns the progress of the absent ranks and of the ranks that these wait for, transitively. If all ranks have
/// started the operation, returns the progress of all of them, because a large operation reports progress chunk by
/// chunk.
std::string DeadlockDetector::read_awaited_progress(const WaitInfo& wait_info) {
  std::vector<int> ranks = find_absent_ranks(wait_info);
  if (ranks.empty()) ranks = *wait_info.members;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const auto other = read_record(wait_key(ranks[i]), wait_info);
    if (!other || other->channel.empty()) continue;
    for (const int next : other->awaited)
      if (std::find(ranks.begin(), ranks.end(), next) == ranks.end()) ranks.push_back(next);
  }
  std::sort(ranks.begin(), ranks.end());
  std::string text;
  for (const int rank : ranks) text += std::to_string(rank) + " ";
  return text + job::health::read_progress(*store_, ranks, store_limit(wait_info));
}

void DeadlockDetector::end_wait(PollState& poll_state) noexcept {
  poll_state.blocked.reset();
  if (!std::exchange(poll_state.is_published, false)) return;
  try {
    std::string text;
    {
      const std::lock_guard lock(mutex_);
      if (poll_state.is_blocking) blocking_wait_.reset();
      text = record();
    }
    store_->set(wait_key(rank_), text, store_deadline());
  } catch (const std::exception&) {
    // The next operation that needs the store reports the failure.
  }
}

/// Store requests have the same limit as waits for ranks: the store does not answer, for example, while the launcher is
/// stopped with SIGSTOP.
Deadline DeadlockDetector::store_limit(const WaitInfo& wait_info) const {
  return earlier(
      wait_info.deadline,
      progress_limit_.count() > 0 ? Deadline::in(progress_limit_) : Deadline::never());  // bounded: the user's choice
}

std::optional<WaitRecord> DeadlockDetector::read_record(const std::string& key, const WaitInfo& wait_info) {
  const auto text = store_->find(key, store_limit(wait_info));
  return text ? WaitRecord::parse(*text) : std::nullopt;
}

void DeadlockDetector::throw_first_cause(const WaitInfo& wait_info) {
  const auto line = store_->find(job::key::kCause, store_limit(wait_info));
  const auto cause = line ? job::parse_fatal(*line) : std::nullopt;
  if (!cause) return;
  const bool ended = cause->cause == Cause::kRankDied || cause->cause == Cause::kRankExited;
  const std::string text =
      wait_info.label + ": " + (ended ? describe_failure(cause->rank, cause->detail) : cause->detail);
  if (ended || cause->cause == Cause::kPeerUnreachable)
    throw PeerLostError(cause->cause, wait_info.label, rank_, cause->rank, text, cause->hint);
  if (cause->cause == Cause::kDesync)
    throw DesyncError(cause->cause, wait_info.label, rank_, cause->rank, text, cause->hint);
  if (cause->cause == Cause::kRankStuck)
    throw TimeoutError(cause->cause, wait_info.label, rank_, cause->rank, text, cause->hint);
  throw CommError(cause->cause, wait_info.label, rank_, cause->rank, text, cause->hint);
}

void DeadlockDetector::throw_if_abandoned(const WaitInfo& wait_info) {
  const auto record = store_->find(abandoned_key(wait_info.channel), store_limit(wait_info));
  if (!record) return;
  const std::size_t end = record->find(kFieldSeparator);
  const auto peer = base::parse_int(std::string_view(*record).substr(0, end));
  throw PeerLostError(Cause::kPeerUnreachable, wait_info.label, rank_, static_cast<int>(peer.value_or(-1)),
                      wait_info.label + ": " + record->substr(std::min(end, record->size() - 1) + 1));
}

void DeadlockDetector::abandon(const std::string& channel, int peer, const std::string& text) noexcept {
  try {
    store_->compare_set(abandoned_key(channel), "", std::to_string(peer) + kFieldSeparator + text, store_deadline());
  } catch (const std::exception&) {
    // The waits of the other ranks end at their deadlines.
  }
}

void DeadlockDetector::check_left(const WaitInfo& wait_info, int peer) {
  const auto record = read_record(job::key::left(peer), wait_info);
  if (!record || record->has_started(wait_info.channel, wait_info.seq)) return;
  throw_first_cause(wait_info);  // a rank that leaves because of an error has published it before
  throw CommError(Cause::kUnevenInput, wait_info.label, rank_, peer,
                  "rank " + std::to_string(peer) + " finished while rank " + std::to_string(rank_) +
                      " waits for it in " + wait_info.text,
                  kUnevenHint);
}

/// Throws if all members have left. What they have sent before has time to arrive.
void DeadlockDetector::check_all_left(const WaitInfo& wait_info, PollState& poll_state) {
  for (const int peer : *wait_info.members)
    if (peer != rank_ && !read_record(job::key::left(peer), wait_info)) {
      poll_state.all_left_since.reset();
      return;
    }
  const auto now = Deadline::Clock::now();
  if (!poll_state.all_left_since) poll_state.all_left_since = now;
  if (now - *poll_state.all_left_since < base::kReconnectGrace) return;
  throw_first_cause(wait_info);
  throw CommError(
      Cause::kUnevenInput, wait_info.label, rank_, -1,
      "all other ranks finished while rank " + std::to_string(rank_) + " waits for one of them in " + wait_info.text,
      "send as many messages as the rank receives");
}

/// Throws if the process of `peer` has ended. A process that exited with 0 may have done its part of the operation
/// first. After a failed connection that is impossible: with `accept_clean_exit` an exit with 0 counts as well.
void DeadlockDetector::check_exited(const WaitInfo& wait_info, int peer, bool accept_clean_exit) {
  const auto how = job::find_exit(*store_, peer, store_limit(wait_info));
  if (!how || (how->kind == job::ExitKind::kClosed && !accept_clean_exit)) return;
  throw_first_cause(wait_info);
  if (how->kind == job::ExitKind::kClosed) {
    check_left(wait_info, peer);
    if (read_record(job::key::left(peer), wait_info)) return;
  }
  if (*how != kCleanExit) {
    // The launcher is about to publish which of the ranks that end now failed first.
    for (const Deadline verdict = Deadline::in(base::kLauncherVerdictTime); !verdict.expired();
         std::this_thread::sleep_for(kPause))
      throw_first_cause(wait_info);
    throw PeerLostError(Cause::kPeerUnreachable, wait_info.label, rank_, peer,
                        wait_info.label + ": " + describe_exit(peer, *how));
  }
  if (!accept_clean_exit) return;
  check_left(wait_info, peer);  // its message is more precise, and it does not throw if the peer did its part
  if (!read_record(job::key::left(peer), wait_info))
    throw CommError(Cause::kUnevenInput, wait_info.label, rank_, peer,
                    "rank " + std::to_string(peer) + " ended while rank " + std::to_string(rank_) +
                        " waits for it in " + wait_info.text,
                    kUnevenHint);
}

/// Throws if the store has had no connection of `peer` for base::kReconnectGrace and `peer` has neither left nor an
/// exit status. Until then it may have lost only its connections, and may connect again.
void DeadlockDetector::check_closed(const WaitInfo& wait_info, int peer, PollState& poll_state) {
  const auto how = job::find_exit(*store_, peer, store_limit(wait_info));
  if (!how || how->kind != job::ExitKind::kClosed || read_record(job::key::left(peer), wait_info)) {
    poll_state.closed_since.erase(peer);
    return;
  }
  const auto now = Deadline::Clock::now();
  const auto since = poll_state.closed_since.try_emplace(peer, now).first->second;
  if (now - since < base::kReconnectGrace) return;
  throw_first_cause(wait_info);
  throw PeerLostError(Cause::kPeerUnreachable, wait_info.label, rank_, peer,
                      wait_info.label + ": " + describe_exit(peer, *how));
}

void DeadlockDetector::check_peer(const WaitInfo& wait_info, int peer, PollState& poll_state) {
  const auto other = read_record(wait_key(peer), wait_info);
  if (!other) return;
  const bool same = other->channel == wait_info.channel && other->seq == wait_info.seq;
  if (same || other->has_started(wait_info.channel, wait_info.seq) || !other->waits_for(rank_)) return;
  {
    const std::lock_guard lock(mutex_);
    const auto mine = start_counters_.find(other->channel);
    if (mine != start_counters_.end() && mine->second >= other->seq) return;
  }
  const auto [before, first] = poll_state.peer_beats.try_emplace(peer, other->beat);
  poll_state.poll_soon |= first;
  if (first || before->second == other->beat) return;
  const bool lower = rank_ < peer;
  // Two models may have parameters of the same names.
  const bool alike = wait_info.text == other->text && wait_info.channel != other->channel;
  const auto call = [&](int rank, const std::string& text, const std::string& channel) {
    return "rank " + std::to_string(rank) + " called " + text + (alike ? " of " + channel : "");
  };
  const std::string here = call(rank_, wait_info.text, wait_info.channel);
  const std::string there = call(peer, other->text, other->channel);
  std::string hint = wait_info.hint.empty() ? other->hint : std::string(wait_info.hint);
  if (hint.empty()) hint = job::kDesyncHint;
  throw DesyncError(Cause::kDesync, wait_info.label, rank_, peer, lower ? here + ", " + there : there + ", " + here,
                    hint);
}

std::vector<int> DeadlockDetector::find_absent_ranks(const WaitInfo& wait_info) {
  std::vector<int> ranks;
  for (const int peer : *wait_info.members) {
    if (peer == rank_) continue;
    const auto other = read_record(wait_key(peer), wait_info);
    if (!other || !other->has_started(wait_info.channel, wait_info.seq)) ranks.push_back(peer);
  }
  return ranks;
}

void DeadlockDetector::throw_timeout(const WaitInfo& wait_info, PollState& poll_state) {
  // The other ranks may have waited as briefly as this rank: give them time to publish before any rank is named.
  const Deadline published =
      Deadline::in(poll_state.is_published ? std::chrono::milliseconds(0) : base::kPeersPublishTime);
  publish_record(wait_info, poll_state);
  std::vector<int> missing = find_absent_ranks(wait_info);
  while (!missing.empty() && !published.expired()) {
    std::this_thread::sleep_for(kPause);
    missing = find_absent_ranks(wait_info);
  }
  std::vector<int> waiting;
  for (const int peer : *wait_info.members)
    if (peer != rank_ && std::find(missing.begin(), missing.end(), peer) == missing.end()) waiting.push_back(peer);
  throw TimeoutError(
      Cause::kRankStuck, wait_info.label, rank_, missing.empty() ? -1 : missing.front(),
      wait_info.text + " did not finish in time; " +
          (missing.empty() ? std::string("all ranks have started it") : "absent ranks: " + base::joined(missing, ",")) +
          (waiting.empty() ? "" : "; other waiting ranks: " + base::joined(waiting, ",")),
      "put long work on one rank under world.busy(), or raise the timeout for waits without progress "
      "(LOCKSTEP_TIMEOUT, InitOptions.timeout)");
}

void DeadlockDetector::throw_transport_failure(const WaitInfo& wait_info, const std::string& text,
                                               const std::string& hint) {
  // The launcher publishes the exit of a peer's process, and a peer that leaves publishes that itself, both almost at
  // once. An exit status takes precedence over a departure, because a program that returns an error from main() leaves
  // its world first.
  const Deadline limit = Deadline::in(base::kTransportFailureReasonTime);
  const Deadline exit_status_limit = Deadline::in(base::kPeersPublishTime);
  for (;;) {
    throw_first_cause(wait_info);
    throw_if_abandoned(wait_info);  // a rank that abandoned the channel may have ended since
    for (const int peer : *wait_info.members) {
      if (peer == rank_) continue;
      check_exited(wait_info, peer, true);
      if (exit_status_limit.expired()) check_left(wait_info, peer);
    }
    if (limit.expired()) break;
    std::this_thread::sleep_for(kPause);
  }
  throw PeerLostError(Cause::kPeerUnreachable, wait_info.label, rank_, -1,
                      wait_info.label + ": the connection to another rank ended: " + text +
                          (remote_ranks_.empty() ? "" : "; ranks on other hosts: " + base::joined(remote_ranks_, ",")),
                      hint);
}

void DeadlockDetector::publish_failure(const CommError& error) noexcept {
  // The loss of a peer is a consequence. The launcher publishes the cause, which is the failure of that peer.
  if (error.cause() == Cause::kPeerUnreachable || error.cause() == Cause::kCoordinatorLost) return;
  const bool is_own = error.peer() < 0 || error.peer() == rank_;
  job::publish_cause(*store_, {.cause = error.cause(),
                               .rank = is_own ? rank_ : error.peer(),
                               .host = is_own ? host_ : "",
                               .pid = is_own ? ::getpid() : -1,
                               .op = error.op(),
                               .detail = error.what(),
                               .hint = error.hint()});
}

void DeadlockDetector::publish_failure(Cause cause, const std::string& text, const std::string& hint,
                                       bool led_to_cause) noexcept {
  const job::Fatal fatal{.cause = cause,
                         .rank = rank_,
                         .host = host_,
                         .pid = ::getpid(),
                         .step = base::telemetry::RankPage::this_process().step(),
                         .detail = text,
                         .hint = hint};
  if (led_to_cause)
    job::replace_cause(*store_, fatal);
  else
    job::publish_cause(*store_, fatal);
}

void DeadlockDetector::leave() noexcept {
  try {
    std::string text;
    {
      const std::lock_guard lock(mutex_);
      blocking_wait_.reset();
      base::telemetry::RankPage::this_process().has_left.store(1, std::memory_order_relaxed);
      text = record();
    }
    store_->set(job::key::left(rank_), text, Deadline::in(std::chrono::seconds(1)));
  } catch (const std::exception&) {
    // The store is gone, so no rank can read the record.
  }
}

}  // namespace lockstep::comm::channel
