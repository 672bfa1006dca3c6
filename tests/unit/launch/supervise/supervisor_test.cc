#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <utility>

#include "lockstep/launch/process/spawn.h"
#include "lockstep/launch/protocol/frames.h"
#include "lockstep/launch/supervise/generation.h"

namespace lockstep::launcher::supervise {
namespace {

using ::testing::HasSubstr;

/// A job of one rank. Its agent is a process that only waits; the launcher reads `from_agent` as the agent's output.
PreparedJob job_with_agent_output(const std::string& from_agent) {
  const base::Fd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  base::Pipe in = base::make_pipe(), out = base::make_pipe();
  EXPECT_EQ(::write(out.write.get(), from_agent.data(), from_agent.size()), static_cast<ssize_t>(from_agent.size()));
  const pid_t pid =
      process::spawn({.path = "/bin/sleep", .argv = {"sleep", "60"}, .in = null.get(), .out = null.get()});
  PreparedJob job{.context = {}, .agents = {}, .nodes = {}, .start_note = {}};
  job.context.store.host = "127.0.0.1";
  job.context.generation = 1;
  job.agents.emplace_back("alpha", "", hosts::AgentProcess{pid, std::move(in.write), std::move(out.read), {}},
                          std::chrono::milliseconds(0));
  job.nodes.push_back({.info = {.cpus = {plan::Cpu{}}}, .name = "alpha", .ranks = 1});
  return job;
}

JobOutcome supervise_output(const std::string& from_agent) {
  ::signal(SIGPIPE, SIG_IGN);  // `lockstep run` blocks it
  cli::RunOptions options;
  options.command = {"train"};
  JobOutcome outcome = supervise(options, job_with_agent_output(from_agent), -1, {});
  outcome.output->finish("", [] { return false; });
  return outcome;
}

TEST(Supervisor, InvalidFrameIsAFailureOfAStartedJob) {
  const JobOutcome outcome =
      supervise_output(protocol::encode({protocol::FrameKind::kStarted, 0, protocol::encode_numbers({4711})}) +
                       protocol::encode({protocol::FrameKind::kCheckpointSaved, 0, protocol::encode_numbers({7})}) +
                       protocol::encode({protocol::FrameKind::kRankExited, 0, "no exit"}));
  ASSERT_TRUE(outcome.verdict);
  EXPECT_EQ(outcome.verdict->fatal.cause, base::Cause::kProtocol);
  EXPECT_EQ(outcome.verdict->fatal.gen, 1);
  EXPECT_THAT(outcome.verdict->fatal.detail, HasSubstr("agent on host alpha"));
  EXPECT_TRUE(outcome.attempt.started);
  EXPECT_EQ(outcome.attempt.newest_checkpoint, 7);
  EXPECT_TRUE(outcome.lost_hosts.contains(0));
}

TEST(Supervisor, FrameOfUnknownRankIsInvalid) {
  const JobOutcome outcome =
      supervise_output(protocol::encode({protocol::FrameKind::kStarted, 3, protocol::encode_numbers({4711})}));
  ASSERT_TRUE(outcome.verdict);
  EXPECT_EQ(outcome.verdict->fatal.cause, base::Cause::kProtocol);
  EXPECT_THAT(outcome.verdict->fatal.detail, HasSubstr("a frame of rank 3; expected 0 to 0"));
}

}  // namespace
}  // namespace lockstep::launcher::supervise
