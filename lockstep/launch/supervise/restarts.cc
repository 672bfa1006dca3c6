#include "lockstep/launch/supervise/restarts.h"

#include <signal.h>

#include <algorithm>
#include <array>
#include <string>

namespace lockstep::launcher {
namespace {

using base::Cause;
using namespace std::chrono_literals;

constexpr int kMaxRestartsWithoutProgress = 3;  // restarts
constexpr std::chrono::milliseconds kMaxRestartPause = 60s;
constexpr std::chrono::milliseconds kMinProgressDuration = 10min;  // of a program that tells of no checkpoint

bool contains(const auto& list, int value) { return std::find(list.begin(), list.end(), value) != list.end(); }

/// What a rank returns, or a shell in its place, that a person must look at: 2 as argparse and shells say it, a command
/// that is not there, and of the codes of causes those that are not worth it.
bool is_user_error(int code) {
  constexpr std::array kCodes = {2, 64, 65, 70, 75, 76, 126, 127};
  return contains(kCodes, code);
}

/// By a person or a scheduler.
bool is_stop_signal(int signal) {
  constexpr std::array kSignals = {SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
  return contains(kSignals, signal);
}

Verdict no_progress(const Verdict& last) {
  Verdict verdict{last.fatal, base::exit_code(Cause::kNoProgress), {}};
  verdict.fatal.cause = Cause::kNoProgress;
  verdict.fatal.detail = std::to_string(kMaxRestartsWithoutProgress) +
                         " restarts in a row have brought no newer checkpoint; the last ended by " +
                         std::string(base::name(last.fatal.cause)) + ": " + last.fatal.detail;
  return verdict;
}

}  // namespace

bool is_restartable(const Verdict& verdict) {
  switch (verdict.fatal.cause) {
    case Cause::kRankExited:
    case Cause::kRankDied: return !is_user_error(verdict.exit_code) && !is_stop_signal(verdict.exit_code - 128);
    // The machine, the network, or nobody knows what.
    case Cause::kPeerUnreachable:
    case Cause::kCoordinatorLost:
    case Cause::kUnkillable:
    case Cause::kInternal:
    case Cause::kResource:
    case Cause::kJoinTimeout:
    case Cause::kRankStuck:
    case Cause::kRankStalled: return true;
    // Somebody wanted it.
    case Cause::kInterrupted:
    case Cause::kPreempted:
    // A person has to mend it; a full disk, too, which would cost all that is computed until the next save.
    case Cause::kBadArg:
    case Cause::kBadFile:
    case Cause::kPortInUse:
    case Cause::kConfigMismatch:
    case Cause::kCkptWriteFailed:
    case Cause::kProtocol:
    case Cause::kWrongJob:
    case Cause::kAuthFailed:
    case Cause::kStaleGen:
    // The same steps from the same state would come to the same; of replicas that differ nobody knows which one was
    // saved.
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
  made_progress_ = attempt.saved > newest_checkpoint_ ||
                   (attempt.started && newest_checkpoint_ == 0 && attempt.duration >= kMinProgressDuration);
  newest_checkpoint_ = std::max(newest_checkpoint_, attempt.saved);
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
    verdict.fatal.detail += max_restarts_ == 1 ? "; the one restart is used up"
                                               : "; all " + std::to_string(max_restarts_) + " restarts are used up";
    return std::nullopt;
  }
  ++num_restarts_;
  const auto pause = pause_;
  pause_ = std::min(2 * pause_, kMaxRestartPause);
  return pause;
}

}  // namespace lockstep::launcher
