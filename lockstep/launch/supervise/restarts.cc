#include "lockstep/launch/supervise/restarts.h"

#include <signal.h>

#include <algorithm>
#include <array>
#include <string>

namespace lockstep::launcher::supervise {
namespace {

constexpr std::chrono::seconds kMinBackoff{10}, kMaxBackoff{600};

using base::Cause;
using namespace std::chrono_literals;

constexpr int kMaxRestartsWithoutProgress = 3;
constexpr std::chrono::milliseconds kMaxRestartPause = 60s;
constexpr std::chrono::milliseconds kMinProgressDuration = 10min;  // for a program that reports no checkpoints

bool contains(const auto& list, int value) { return std::ranges::find(list, value) != list.end(); }

/// Returns whether an exit code of a rank, or of a shell that started it, means an error that a user must fix, or a
/// stop that was requested.
bool is_user_error(int code) {
  constexpr std::array kOfShells = {2, 126, 127};  // also argparse; a command that cannot be executed or does not exist
  constexpr std::array kCauses = {Cause::kBadArg, Cause::kBadFile,  Cause::kFolderInUse,
                                  Cause::kDesync, Cause::kProtocol, Cause::kPreempted};
  return contains(kOfShells, code) || code == base::exit_code_before_start(Cause::kBadArg) ||
         std::ranges::any_of(kCauses, [&](Cause cause) { return base::exit_code(cause) == code; });
}

/// Returns whether a user or a scheduler sends this signal to stop a process.
bool is_stop_signal(int signal) {
  constexpr std::array kSignals = {SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
  return contains(kSignals, signal);
}

Verdict no_progress(const Verdict& last) {
  job::Fatal fatal = last.fatal;
  fatal.cause = Cause::kNoProgress;
  fatal.detail = std::to_string(kMaxRestartsWithoutProgress) +
                 " restarts in a row produced no newer checkpoint; the last failure was " +
                 std::string(base::name(last.fatal.cause)) + ": " + last.fatal.detail;
  return verdict_on(std::move(fatal));
}

}  // namespace

void HostBackoff::record_failure(std::size_t host, Time now) {
  Backoff& backoff = hosts_.at(host);
  backoff.last = std::clamp(2 * backoff.last, kMinBackoff, kMaxBackoff);
  backoff.until = now + backoff.last;
}

std::vector<std::size_t> HostBackoff::available(Time now) const {
  std::vector<std::size_t> numbers;
  for (std::size_t host = 0; host < hosts_.size(); ++host)
    if (hosts_[host].until <= now) numbers.push_back(host);
  return numbers;
}

HostBackoff::Time HostBackoff::when_available(std::size_t count) const {
  if (count == 0) return {};
  std::vector<Time> times;
  for (const Backoff& backoff : hosts_) times.push_back(backoff.until);
  const auto last = times.begin() + static_cast<std::ptrdiff_t>(std::min(count, times.size()) - 1);
  std::nth_element(times.begin(), last, times.end());
  return *last;
}

bool is_restartable(const Verdict& verdict) {
  switch (verdict.fatal.cause) {
    case Cause::kRankExited:
    case Cause::kRankDied: return !is_user_error(verdict.exit_code) && !is_stop_signal(verdict.exit_code - 128);
    // The cause is the machine, the network, or unknown.
    case Cause::kPeerUnreachable:
    case Cause::kCoordinatorLost:
    case Cause::kUnkillable:
    case Cause::kInternal:
    case Cause::kResource:
    case Cause::kJoinTimeout:
    case Cause::kRankStuck:
    case Cause::kRankStalled: return true;
    // The stop was requested.
    case Cause::kInterrupted:
    case Cause::kPreempted:
    // A user must fix these. That includes a full disk: the job would fail again at its next save and lose the work
    // since the last checkpoint.
    case Cause::kBadArg:
    case Cause::kBadFile:
    case Cause::kPortInUse:
    case Cause::kFolderInUse:
    case Cause::kConfigMismatch:
    case Cause::kCkptWriteFailed:
    case Cause::kProtocol:
    case Cause::kWrongJob:
    case Cause::kAuthFailed:
    case Cause::kStaleGen:
    // A restart from the same state would fail in the same way. If replicas differ, it is unknown which one was saved.
    case Cause::kDesync:
    case Cause::kUnevenInput:
    case Cause::kNonFinite:
    case Cause::kReplicaDiverged:
    case Cause::kNoProgress:
    case Cause::kStraggler: return false;
  }
  return false;
}

void Restarts::record(const Attempt& attempt) {
  made_progress_ = attempt.newest_checkpoint > newest_checkpoint_ ||
                   (attempt.started && newest_checkpoint_ == 0 && attempt.duration >= kMinProgressDuration);
  newest_checkpoint_ = std::max(newest_checkpoint_, attempt.newest_checkpoint);
  if (made_progress_) {
    without_progress_ = 0;
    pause_ = first_pause_;
  } else if (attempt.started && num_restarts_ > 0) {
    ++without_progress_;
  }
}

std::optional<std::chrono::milliseconds> Restarts::next(const Attempt& attempt, Verdict& verdict) {
  record(attempt);
  if (max_restarts_ == 0 || !is_restartable(verdict)) return std::nullopt;
  if (without_progress_ >= kMaxRestartsWithoutProgress) {
    verdict = no_progress(verdict);
    return std::nullopt;
  }
  if (num_restarts_ == max_restarts_) {
    verdict.fatal.detail += max_restarts_ == 1 ? "; the only restart is used up"
                                               : "; all " + std::to_string(max_restarts_) + " restarts are used up";
    return std::nullopt;
  }
  ++num_restarts_;
  const auto pause = pause_;
  pause_ = std::min(2 * pause_, kMaxRestartPause);
  return pause;
}

}  // namespace lockstep::launcher::supervise
