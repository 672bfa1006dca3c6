#include "lockstep/base/cause.h"

#include <gtest/gtest.h>

#include <map>

#include "lockstep/base/error.h"

namespace lockstep::base {
namespace {

TEST(Cause, NamesAndExitCodesMatchTheReference) {
  const std::map<std::string, std::pair<Cause, int>> table = {
      {"RANK_EXITED", {Cause::kRankExited, 1}},
      {"RANK_DIED", {Cause::kRankDied, 1}},
      {"INTERRUPTED", {Cause::kInterrupted, 130}},
      {"BAD_ARG", {Cause::kBadArg, 78}},
      {"BAD_FILE", {Cause::kBadFile, 65}},
      {"PORT_IN_USE", {Cause::kPortInUse, 78}},
      {"FOLDER_IN_USE", {Cause::kFolderInUse, 73}},
      {"PEER_UNREACHABLE", {Cause::kPeerUnreachable, 69}},
      {"COORDINATOR_LOST", {Cause::kCoordinatorLost, 69}},
      {"DESYNC", {Cause::kDesync, 70}},
      {"CONFIG_MISMATCH", {Cause::kConfigMismatch, 70}},
      {"REPLICA_DIVERGED", {Cause::kReplicaDiverged, 70}},
      {"NON_FINITE", {Cause::kNonFinite, 70}},
      {"UNEVEN_INPUT", {Cause::kUnevenInput, 70}},
      {"UNKILLABLE", {Cause::kUnkillable, 70}},
      {"NO_PROGRESS", {Cause::kNoProgress, 70}},
      {"INTERNAL", {Cause::kInternal, 70}},
      {"RESOURCE", {Cause::kResource, 74}},
      {"CKPT_WRITE_FAILED", {Cause::kCkptWriteFailed, 74}},
      {"PROTOCOL", {Cause::kProtocol, 76}},
      {"WRONG_JOB", {Cause::kWrongJob, 76}},
      {"AUTH_FAILED", {Cause::kAuthFailed, 76}},
      {"STALE_GEN", {Cause::kStaleGen, 76}},
      {"PREEMPTED", {Cause::kPreempted, 75}},
      {"STRAGGLER", {Cause::kStraggler, 0}},
      {"JOIN_TIMEOUT", {Cause::kJoinTimeout, 124}},
      {"RANK_STUCK", {Cause::kRankStuck, 124}},
      {"RANK_STALLED", {Cause::kRankStalled, 124}},
  };
  EXPECT_EQ(table.size(), kNumCauses) << "the enumeration has values that this table lacks";
  for (const auto& [text, row] : table) {
    EXPECT_EQ(name(row.first), text);
    EXPECT_EQ(cause_from_name(text), row.first);
    EXPECT_EQ(exit_code(row.first), row.second) << text;
  }
  EXPECT_EQ(exit_code_before_start(Cause::kBadArg), 64);
  EXPECT_EQ(exit_code_before_start(Cause::kPortInUse), 64);
  EXPECT_EQ(exit_code_before_start(Cause::kResource), exit_code(Cause::kResource));
  EXPECT_EQ(cause_from_name("desync"), Cause::kInternal);
  EXPECT_EQ(cause_from_name(""), Cause::kInternal);
}

TEST(Cause, ErrorTypesHaveTheirCause) {
  EXPECT_EQ(UsageError("x").cause(), Cause::kBadArg);
  EXPECT_EQ(FormatError("x").cause(), Cause::kBadFile);
  const SystemError system("cannot open x", ENOENT);
  EXPECT_EQ(system.cause(), Cause::kResource);
  EXPECT_STREQ(system.what(), "cannot open x: No such file or directory");
  EXPECT_EQ(system.error_number(), ENOENT);
  const DesyncError desync(Cause::kDesync, "all_reduce#1", 2, 0, "text", "hint");
  EXPECT_EQ(desync.op(), "all_reduce#1");
  EXPECT_EQ(desync.rank(), 2);
  EXPECT_EQ(desync.peer(), 0);
  EXPECT_EQ(desync.hint(), "hint");
}

}  // namespace
}  // namespace lockstep::base
