#include "lockstep/launch/supervise/restarts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <array>
#include <utility>

namespace lockstep::launcher::supervise {
namespace {

using base::Cause;
using namespace std::chrono_literals;
using ::testing::HasSubstr;

Verdict verdict(Cause cause, int exit_code) {
  Verdict one;
  one.fatal.cause = cause;
  one.fatal.detail = "it failed";
  one.exit_code = exit_code;
  return one;
}
Verdict verdict(Cause cause) { return verdict(cause, base::exit_code(cause)); }
Verdict died() { return verdict(Cause::kRankDied, 128 + SIGKILL); }

TEST(IsRestartable, OfEachCause) {
  static constexpr auto kTable = std::to_array<std::pair<Cause, bool>>(
      {{Cause::kRankExited, true},       {Cause::kRankDied, true},        {Cause::kInterrupted, false},
       {Cause::kBadArg, false},          {Cause::kBadFile, false},        {Cause::kPortInUse, false},
       {Cause::kFolderInUse, false},     {Cause::kPeerUnreachable, true}, {Cause::kCoordinatorLost, true},
       {Cause::kDesync, false},          {Cause::kConfigMismatch, false}, {Cause::kReplicaDiverged, false},
       {Cause::kNonFinite, false},       {Cause::kUnevenInput, false},    {Cause::kUnkillable, true},
       {Cause::kNoProgress, false},      {Cause::kInternal, true},        {Cause::kResource, true},
       {Cause::kCkptWriteFailed, false}, {Cause::kProtocol, false},       {Cause::kWrongJob, false},
       {Cause::kAuthFailed, false},      {Cause::kStaleGen, false},       {Cause::kPreempted, false},
       {Cause::kStraggler, false},       {Cause::kJoinTimeout, true},     {Cause::kRankStuck, true},
       {Cause::kRankStalled, true}});
  static_assert(kTable.size() == base::kNumCauses, "one entry per cause");
  for (const auto& [cause, restartable] : kTable)
    EXPECT_EQ(is_restartable(verdict(cause)), restartable) << base::name(cause);
}

TEST(IsRestartable, OfEachExitCode) {
  for (int code = 1; code < 256; ++code) {
    const bool user_error = code == 2 || code == 64 || code == 65 || code == 70 || code == 73 || code == 75 ||
                            code == 78 || code == 76 || code == 126 || code == 127;
    const bool stop_signal = code == 128 + SIGHUP || code == 128 + SIGINT || code == 128 + SIGTERM ||
                             code == 128 + SIGUSR1 || code == 128 + SIGUSR2;
    EXPECT_EQ(is_restartable(verdict(Cause::kRankExited, code)), !user_error && !stop_signal) << code;
  }
}

TEST(IsRestartable, OfEachSignal) {
  for (const int signal : {SIGKILL, SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGPIPE, SIGXCPU})
    EXPECT_TRUE(is_restartable(verdict(Cause::kRankDied, 128 + signal))) << signal;
  for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2})
    EXPECT_FALSE(is_restartable(verdict(Cause::kRankDied, 128 + signal))) << signal;
}

TEST(Restarts, NoRestartsWhenDisabled) {
  Restarts restarts(0, 1s);
  Verdict last = died();
  EXPECT_FALSE(restarts.next({}, last));
  EXPECT_EQ(last.fatal.detail, "it failed");
  EXPECT_EQ(restarts.num_restarts(), 0);
}

TEST(Restarts, PausesDoubleUpToAMinute) {
  Restarts restarts(100, 1s);
  for (const auto pause : {1s, 2s, 4s, 8s, 16s, 32s, 60s, 60s}) {
    Verdict last = died();
    EXPECT_EQ(restarts.next({.started = false}, last), pause);
  }
}

TEST(Restarts, PausesResetAfterProgress) {
  Restarts restarts(100, 1s);
  Verdict last = died();
  EXPECT_EQ(restarts.next({}, last), 1s);
  EXPECT_EQ(restarts.next({}, last), 2s);
  EXPECT_EQ(restarts.next({.newest_checkpoint = 1}, last), 1s);
  EXPECT_TRUE(restarts.made_progress());
  EXPECT_EQ(restarts.next({.newest_checkpoint = 1}, last), 2s);
  EXPECT_FALSE(restarts.made_progress());
  EXPECT_EQ(restarts.newest_checkpoint(), 1);
}

TEST(Restarts, ThreeRestartsWithoutANewerCheckpoint) {
  Restarts restarts(100, 0s);
  Verdict last = died();
  EXPECT_TRUE(restarts.next({.newest_checkpoint = 5}, last));  // the first start is not a restart
  EXPECT_TRUE(restarts.next({.newest_checkpoint = 5}, last));
  EXPECT_TRUE(restarts.next({.newest_checkpoint = 4}, last));
  EXPECT_TRUE(restarts.next({.newest_checkpoint = 6}, last));
  EXPECT_TRUE(restarts.next({}, last));
  EXPECT_TRUE(restarts.next({.newest_checkpoint = 6}, last));
  last = verdict(Cause::kRankStuck);
  last.fatal.rank = 3;
  EXPECT_FALSE(restarts.next({}, last));
  EXPECT_EQ(last.fatal.cause, Cause::kNoProgress);
  EXPECT_EQ(last.exit_code, 70);
  EXPECT_EQ(last.fatal.rank, 3);
  EXPECT_THAT(last.fatal.detail, HasSubstr("3 restarts in a row"));
  EXPECT_THAT(last.fatal.detail, HasSubstr("RANK_STUCK: it failed"));
}

TEST(Restarts, FailedStartsDoNotCountAsNoProgress) {
  Restarts restarts(10, 0s);
  Verdict last = verdict(Cause::kPeerUnreachable);
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(restarts.next({.started = i == 0}, last)) << i;
  EXPECT_FALSE(restarts.next({.started = false}, last));
  EXPECT_EQ(last.fatal.cause, Cause::kPeerUnreachable);
  EXPECT_EQ(last.fatal.detail, "it failed; all 10 restarts are used up");
}

TEST(Restarts, SingleRestart) {
  Restarts restarts(1, 0s);
  Verdict last = died();
  EXPECT_TRUE(restarts.next({}, last));
  EXPECT_FALSE(restarts.next({}, last));
  EXPECT_EQ(last.fatal.detail, "it failed; the only restart is used up");
  EXPECT_EQ(last.exit_code, 137);
}

TEST(Restarts, DurationCountsAsProgressWithoutCheckpoints) {
  const auto count_starts = [](const Attempt& each) {
    Restarts restarts(50, 0s);
    Verdict last = died();
    int starts = 1;
    while (restarts.next(each, last)) ++starts;
    return starts;
  };
  EXPECT_EQ(count_starts({.duration = 10min}), 51);
  EXPECT_EQ(count_starts({.duration = 9min}), 4);
  EXPECT_EQ(count_starts({.newest_checkpoint = 1, .duration = 24h}), 4);
}

TEST(Restarts, UserErrorEndsRestarts) {
  Restarts restarts(5, 0s);
  Verdict last = died();
  EXPECT_TRUE(restarts.next({}, last));
  last = verdict(Cause::kDesync);
  EXPECT_FALSE(restarts.next({}, last));
  EXPECT_EQ(last.fatal.detail, "it failed");
  EXPECT_EQ(restarts.num_restarts(), 1);
}

}  // namespace
}  // namespace lockstep::launcher::supervise
