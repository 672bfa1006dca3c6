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
using base::PeerLost;
using base::TimeoutError;

constexpr char kField = '\x1f';
constexpr auto kStoreLimit = std::chrono::seconds(5);
constexpr auto kPause = std::chrono::milliseconds(10);
constexpr auto kLooksAreDue = std::chrono::seconds(5);  // there is one every second, and a busy store may hold it up
// A wait publishes itself within 200 ms: after this, whoever came before it began to wait has said so.
constexpr auto kOthersPublish = std::chrono::milliseconds(300);
constexpr auto kLauncherDecides = std::chrono::milliseconds(500);
constexpr std::string_view kExitedGood = "exited with code 0";
constexpr const char* kUnevenHint =
    "give every rank the same number of batches, or put the loop under lockstep::join()";

Deadline soon() { return Deadline::in(kStoreLimit); }
std::string wait_key(int rank) { return "wait/" + std::to_string(rank); }
std::string how_it_ended(int rank, const std::string& how) {
  return "rank " + std::to_string(rank) +
         (how.starts_with("killed ")                                ? " was "
          : how.starts_with("exited ") || how.starts_with("ended ") ? " "
                                                                    : ": ") +
         how;
}
std::string numbers(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ",") + std::to_string(rank);
  return text;
}
std::string abandoned_key(const std::string& channel) { return "abandoned/" + channel; }

}  // namespace

/// What a rank published: the wait that blocks it (channel is empty when there is none), and how far it has come on
/// each channel.
struct Watch::Peer {
  std::string beat;
  std::string channel;
  std::uint64_t seq = 0;
  std::string text;
  std::string members;
  std::map<std::string, std::uint64_t> started;

  static std::optional<Peer> parse(const std::string& record) {
    const auto lines = base::split(record, '\n');
    const auto head = base::split(lines[0], kField);
    if (head.size() != 5) return std::nullopt;
    Peer peer{head[0], head[1], static_cast<std::uint64_t>(base::parse_int(head[2]).value_or(0)), head[3], head[4], {}};
    for (std::size_t i = 1; i < lines.size(); ++i) {
      const auto pair = base::split(lines[i], kField);
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

Watch::Watch(std::shared_ptr<job::Store> store, int rank, std::string host, std::chrono::milliseconds limit,
             std::vector<int> far)
    : store_(std::move(store)), rank_(rank), host_(std::move(host)), limit_(limit), far_(std::move(far)) {}

Watch::Count& Watch::count_of(const std::string& channel) {
  const std::lock_guard lock(mutex_);
  return started_[channel];
}

void Watch::add_starter() {
  if (apart_) return;
  const std::lock_guard lock(mutex_);
  starters_.insert(acting_thread());
  last_starter_.store(acting_thread(), std::memory_order_relaxed);
}

Watch::LaneWait::LaneWait(Watch& watch, const Lane* lane, PendingPtr pending) : watch_(watch) {
  if (apart_) return;
  const std::lock_guard lock(watch_.mutex_);
  watch_.lane_waited_for_ = lane;
  watch_.pending_waited_for_ = std::move(pending);
}

Watch::LaneWait::~LaneWait() {
  if (apart_) return;
  const std::lock_guard lock(watch_.mutex_);
  watch_.lane_waited_for_ = nullptr;
  watch_.pending_waited_for_ = nullptr;
}

/// Whether the wait of this thread keeps the process from starting anything else.
bool Watch::blocked_locked() const {
  if (starters_.size() != 1 || apart_) return false;
  if (!Lane::current()) return starters_.contains(acting_thread());
  return lane_waited_for_ == Lane::current() && !pending_waited_for_->done();
}

/// With mutex_ held.
std::string Watch::record() {
  std::string text = std::to_string(beat_) + kField + (blocked_in_.empty() ? std::string(3, kField) : blocked_in_);
  for (const auto& [channel, seq] : started_)
    text += "\n" + channel + kField + std::to_string(seq.load(std::memory_order_acquire));
  return text;
}

void Watch::publish_record(const Waiting& waiting, Looks& looks) {
  std::string text;
  {
    const std::lock_guard lock(mutex_);
    const bool blocked = blocked_locked();
    if (blocked) {
      ++beat_;
      blocked_in_ = waiting.channel + kField + std::to_string(waiting.seq) + kField + waiting.text + kField;
      for (const int member : *waiting.members) blocked_in_ += std::to_string(member) + ",";
    } else if (looks.blocked) {
      blocked_in_.clear();
    }
    if (!blocked) looks.beats.clear();
    looks.blocked = blocked;
    base::RankPage::process().waiting.store(!blocked_in_.empty(), std::memory_order_relaxed);
    text = record();
  }
  store_->set(wait_key(rank_), text, patience(waiting));
  looks.published = true;
}

void Watch::look(const Waiting& waiting, Looks& looks) {
  try {
    look_at_store(waiting, looks);
  } catch (const CommError& error) {
    if (error.cause() == Cause::kPeerUnreachable && error.op() == "store") store_is_out_of_reach(waiting, error);
    throw;
  }
}

/// This host is cut off: as far as it can tell from all others.
void Watch::store_is_out_of_reach(const Waiting& waiting, const CommError& error) {
  const std::string far = far_.empty() ? "" : "; the ranks of other hosts, out of reach: " + numbers(far_);
  throw PeerLost(error.cause(), waiting.label, rank_, far_.empty() ? -1 : far_.front(),
                 waiting.label + ": " + error.what() + far, error.hint());
}

void Watch::look_at_store(const Waiting& waiting, Looks& looks) {
  throw_first_cause(waiting);
  throw_if_abandoned(waiting);
  publish_record(waiting, looks);
  for (const int peer : *waiting.members) {
    if (peer == rank_) continue;
    check_exited(waiting, peer, false);
    check_left(waiting, peer);
    check_closed(waiting, peer, looks);
    if (looks.blocked) check_peer(waiting, peer, looks);
  }
  check_progress(waiting, looks);
}

bool Watch::job_has_failed() { return base::RankPage::process().stop.load(std::memory_order_relaxed) != 0; }

void Watch::check_progress(const Waiting& waiting, Looks& looks) {
  if (limit_.count() == 0) return;
  const auto now = Deadline::Clock::now();
  if (looks.moved == Deadline::Clock::time_point{}) looks.moved = looks.looked = now;
  // Time in which this rank itself stood still does not count.
  if (now - looks.looked > kLooksAreDue) looks.moved += now - looks.looked;
  looks.looked = now;
  std::string progress = progress_of_awaited(waiting);
  if (progress != looks.progress) {
    looks.progress = std::move(progress);
    looks.moved = now;
  }
  if (now - looks.moved >= limit_) timed_out(waiting, looks);
}

/// Of those that have not come, and of those that they wait for in turn; of all when all have come, and move what is
/// much.
std::string Watch::progress_of_awaited(const Waiting& waiting) {
  std::vector<int> ranks = absent(waiting);
  if (ranks.empty()) ranks = *waiting.members;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const auto other = peer_in(wait_key(ranks[i]), waiting);
    if (!other || other->channel.empty()) continue;
    for (const int next : other->awaited())
      if (std::find(ranks.begin(), ranks.end(), next) == ranks.end()) ranks.push_back(next);
  }
  std::sort(ranks.begin(), ranks.end());
  std::string who;
  for (const int rank : ranks) who += std::to_string(rank) + " ";
  return who + job::progress_of(*store_, ranks, patience(waiting));
}

void Watch::end(Looks& looks) noexcept {
  if (!looks.published) return;
  looks.published = false;
  try {
    std::string text;
    {
      const std::lock_guard lock(mutex_);
      if (looks.blocked) blocked_in_.clear();
      base::RankPage::process().waiting.store(!blocked_in_.empty(), std::memory_order_relaxed);
      text = record();
    }
    store_->set(wait_key(rank_), text, soon());
  } catch (const std::exception&) {
    // A store that is gone is noticed by the next operation that needs it.
  }
}

/// A store that stands still, as when a person has stopped the launcher, is waited for as long as a rank is.
Deadline Watch::patience(const Waiting& waiting) const {
  return earlier(waiting.deadline,
                 limit_.count() > 0 ? Deadline::in(limit_) : Deadline::never());  // bounded: as the user wants it
}

std::optional<Watch::Peer> Watch::peer_in(const std::string& key, const Waiting& waiting) {
  const auto text = store_->find(key, patience(waiting));
  return text ? Peer::parse(*text) : std::nullopt;
}

void Watch::throw_first_cause(const Waiting& waiting) {
  const auto line = store_->find(job::key::kCause, patience(waiting));
  const auto cause = line ? job::parse_fatal(*line) : std::nullopt;
  if (!cause) return;
  const bool ended = cause->cause == Cause::kRankDied || cause->cause == Cause::kRankExited;
  const std::string text = waiting.label + ": " + (ended ? how_it_ended(cause->rank, cause->detail) : cause->detail);
  if (ended || cause->cause == Cause::kPeerUnreachable)
    throw PeerLost(cause->cause, waiting.label, rank_, cause->rank, text, cause->hint);
  if (cause->cause == Cause::kDesync)
    throw DesyncError(cause->cause, waiting.label, rank_, cause->rank, text, cause->hint);
  if (cause->cause == Cause::kRankStuck)
    throw TimeoutError(cause->cause, waiting.label, rank_, cause->rank, text, cause->hint);
  throw CommError(cause->cause, waiting.label, rank_, cause->rank, text, cause->hint);
}

void Watch::throw_if_abandoned(const Waiting& waiting) {
  const auto record = store_->find(abandoned_key(waiting.channel), patience(waiting));
  if (!record) return;
  const std::size_t end = record->find(kField);
  const auto peer = base::parse_int(std::string_view(*record).substr(0, end));
  throw PeerLost(Cause::kPeerUnreachable, waiting.label, rank_, static_cast<int>(peer.value_or(-1)),
                 waiting.label + ": " + record->substr(std::min(end, record->size() - 1) + 1));
}

void Watch::abandon(const std::string& channel, int peer, const std::string& text) noexcept {
  try {
    store_->compare_set(abandoned_key(channel), "", std::to_string(peer) + kField + text, soon());
  } catch (const std::exception&) {
    // The others' waits end at their deadline.
  }
}

void Watch::check_left(const Waiting& waiting, int peer) {
  const auto record = peer_in(job::key::left(peer), waiting);
  if (!record || record->has_started(waiting.channel, waiting.seq)) return;
  throw_first_cause(waiting);  // who leaves because of an error has published it before
  throw CommError(Cause::kUnevenInput, waiting.label, rank_, peer,
                  "rank " + std::to_string(peer) + " finished while rank " + std::to_string(rank_) +
                      " waits for it in " + waiting.text,
                  kUnevenHint);
}

/// A process that has ended will not come. `also_good`: one that returned 0 may have done its part before, which only a
/// wire that failed rules out.
void Watch::check_exited(const Waiting& waiting, int peer, bool also_good) {
  const auto how = store_->find(job::key::exited(peer), patience(waiting));
  if (!how || how->empty() || (*how == job::key::kClosed && !also_good)) return;
  throw_first_cause(waiting);
  if (*how == job::key::kClosed) {
    check_left(waiting, peer);
    if (peer_in(job::key::left(peer), waiting)) return;
  }
  if (*how != kExitedGood) {
    // The launcher is about to say which of those that end now was the first.
    for (const Deadline told = Deadline::in(kLauncherDecides); !told.expired(); std::this_thread::sleep_for(kPause))
      throw_first_cause(waiting);
    throw PeerLost(Cause::kPeerUnreachable, waiting.label, rank_, peer,
                   waiting.label + ": " + how_it_ended(peer, *how));
  }
  if (!also_good) return;
  check_left(waiting, peer);  // says it better, and knows of a part that was done
  if (!peer_in(job::key::left(peer), waiting))
    throw CommError(Cause::kUnevenInput, waiting.label, rank_, peer,
                    "rank " + std::to_string(peer) + " ended while rank " + std::to_string(rank_) +
                        " waits for it in " + waiting.text,
                    kUnevenHint);
}

/// A process of which only that it ended is known may have done its part before, or may have lost no more than its
/// connections.
void Watch::check_closed(const Waiting& waiting, int peer, Looks& looks) {
  const auto how = store_->find(job::key::exited(peer), patience(waiting));
  if (!how || *how != job::key::kClosed || peer_in(job::key::left(peer), waiting)) {
    looks.closed.erase(peer);
    return;
  }
  const auto now = Deadline::Clock::now();
  const auto since = looks.closed.try_emplace(peer, now).first->second;
  if (now - since < job::kComesBack) return;
  throw_first_cause(waiting);
  throw PeerLost(Cause::kPeerUnreachable, waiting.label, rank_, peer, waiting.label + ": " + how_it_ended(peer, *how));
}

void Watch::check_peer(const Waiting& waiting, int peer, Looks& looks) {
  const auto other = peer_in(wait_key(peer), waiting);
  if (!other) return;
  const bool same = other->channel == waiting.channel && other->seq == waiting.seq;
  if (same || other->has_started(waiting.channel, waiting.seq) || !other->waits_for(rank_)) return;
  {
    const std::lock_guard lock(mutex_);
    const auto mine = started_.find(other->channel);
    if (mine != started_.end() && mine->second >= other->seq) return;
  }
  const auto [before, first] = looks.beats.try_emplace(peer, other->beat);
  looks.soon |= first;
  if (first || before->second == other->beat) return;
  const bool lower = rank_ < peer;
  const std::string here = "rank " + std::to_string(rank_) + " called " + waiting.text;
  const std::string there = "rank " + std::to_string(peer) + " called " + other->text;
  throw DesyncError(Cause::kDesync, waiting.label, rank_, peer, lower ? here + ", " + there : there + ", " + here,
                    "every rank must make the same calls in the same order: look for a call inside 'if (rank == 0)'");
}

std::vector<int> Watch::absent(const Waiting& waiting) {
  std::vector<int> ranks;
  for (const int peer : *waiting.members) {
    if (peer == rank_) continue;
    const auto other = peer_in(wait_key(peer), waiting);
    if (!other || !other->has_started(waiting.channel, waiting.seq)) ranks.push_back(peer);
  }
  return ranks;
}

void Watch::timed_out(const Waiting& waiting, Looks& looks) {
  // The others may have waited as shortly as this rank: all say that they came before anybody is named.
  const Deadline told = Deadline::in(looks.published ? std::chrono::milliseconds(0) : kOthersPublish);
  publish_record(waiting, looks);
  std::vector<int> missing = absent(waiting);
  while (!missing.empty() && !told.expired()) {
    std::this_thread::sleep_for(kPause);
    missing = absent(waiting);
  }
  std::vector<int> came;
  for (const int peer : *waiting.members)
    if (peer != rank_ && std::find(missing.begin(), missing.end(), peer) == missing.end()) came.push_back(peer);
  throw TimeoutError(
      Cause::kRankStuck, waiting.label, rank_, missing.empty() ? -1 : missing.front(),
      "no end of " + waiting.text + " before its deadline; " +
          (missing.empty() ? std::string("all ranks have come") : "ranks that have not come: " + numbers(missing)) +
          (came.empty() ? "" : "; ranks that wait too: " + numbers(came)),
      "long work on one rank goes under world.busy(); LOCKSTEP_TIMEOUT or InitOptions.timeout sets how long a rank "
      "waits for others that "
      "do not get on");
}

void Watch::wire_failed(const Waiting& waiting, const std::string& text, const std::string& hint) {
  // A peer's process that ended is announced by the launcher, a peer that left by itself: both within moments. How a
  // process ended outranks that it left its world before, as one does that returns an error from main().
  const Deadline limit = Deadline::in(std::chrono::seconds(1));
  const Deadline left_counts = Deadline::in(kOthersPublish);
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
  throw PeerLost(Cause::kPeerUnreachable, waiting.label, rank_, -1,
                 waiting.label + ": the connection to another rank ended: " + text +
                     (far_.empty() ? "" : "; on other hosts are ranks " + numbers(far_)),
                 hint);
}

void Watch::publish(const CommError& error) noexcept {
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

void Watch::publish(Cause cause, const std::string& text, const std::string& hint) noexcept {
  const std::int64_t step = base::RankPage::process().step();
  job::publish_cause(
      *store_,
      {.cause = cause, .rank = rank_, .host = host_, .pid = ::getpid(), .step = step, .detail = text, .hint = hint});
}

void Watch::leave() noexcept {
  try {
    std::string text;
    {
      const std::lock_guard lock(mutex_);
      blocked_in_.clear();
      base::RankPage::process().left.store(1, std::memory_order_relaxed);
      text = record();
    }
    store_->set(job::key::left(rank_), text, Deadline::in(std::chrono::seconds(1)));
  } catch (const std::exception&) {
    // Nobody is left to be told.
  }
}

}  // namespace lockstep::comm
