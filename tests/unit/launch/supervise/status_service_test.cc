#include "lockstep/launch/supervise/status_service.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/timeouts.h"
#include "lockstep/launch/protocol/frames.h"
#include "lockstep/launch/protocol/status_socket.h"

namespace lockstep::launcher::supervise {
namespace {

using protocol::RankState;
using namespace std::chrono_literals;

constexpr const char* kPrefix = "lockstep-status-service-test-";
constexpr pid_t kNoProcess = 1 << 30;  // above the largest pid; not -1, which kill(2) takes for all processes

/// A service with two agents, which are pipes: alpha with rank 0, and beta with ranks 1 and 2.
class StatusServiceTest : public ::testing::Test {
 protected:
  StatusServiceTest() {
    for (const char* host : {"alpha", "beta"}) {
      base::Pipe in = base::make_pipe(), out = base::make_pipe();
      base::set_nonblocking(in.read.get());
      requests_.push_back(std::move(in.read));
      outputs_.push_back(std::move(out.write));
      agents_.emplace_back(host, "", hosts::AgentProcess{kNoProcess, std::move(in.write), std::move(out.read), {}},
                           0ms);
    }
  }

  /// Connects as `lockstep status` does, and lets the service accept.
  base::Fd connect() {
    base::Fd mine;
    for (base::net::AbstractConnection& one : base::net::connect_to_all(kPrefix))
      if (one.pid == ::getpid()) mine = std::move(one.fd);
    service_.accept(agents_);
    return mine;
  }
  static protocol::JobStatus reply_to(const base::Fd& connection) {
    return protocol::receive_job_status(connection.get(), base::Deadline::in(5s));
  }
  /// Returns the number of requests that an agent has received since the last call.
  std::size_t count_requests(std::size_t agent) {
    char bytes[1000];
    const ssize_t size = ::read(requests_[agent].get(), bytes, sizeof bytes);
    return size < 0 ? 0
                    : static_cast<std::size_t>(size) /
                          protocol::encode({protocol::FrameKind::kStatusRequest, -1, {}}).size();
  }
  void add(std::size_t agent, int rank) {
    service_.add(agent, {.rank = rank, .host = {}, .state = RankState::kRunning, .pid = 100 + rank});
  }
  void add_all_of_beta() {
    add(1, 1);
    add(1, 2);
    service_.on_done(1);
  }

  std::vector<base::Fd> requests_, outputs_;
  std::vector<hosts::AgentLink> agents_;
  StatusService service_{{.id = "id", .name = "train", .launcher_host = "ctl", .launcher_pid = 9, .world_size = 3},
                         {{.info = {}, .name = "alpha", .ranks = 1}, {.info = {}, .name = "beta", .ranks = 2}},
                         kPrefix};
};

TEST_F(StatusServiceTest, AgentsAreAskedOnlyWhileAProcessIsConnected) {
  service_.accept(agents_);
  service_.reply_if_due();
  EXPECT_TRUE(service_.deadline().is_never());
  EXPECT_EQ(count_requests(0), 0u);
  const base::Fd first = connect(), second = connect();
  EXPECT_EQ(count_requests(0), 1u) << "one request for both";
  EXPECT_FALSE(service_.deadline().is_never());
  add(0, 0);
  service_.on_done(0);
  add_all_of_beta();
  service_.reply_if_due();
  EXPECT_TRUE(service_.deadline().is_never());
  for (const base::Fd* connection : {&first, &second}) {
    const protocol::JobStatus job = reply_to(*connection);
    EXPECT_TRUE(job.is_whole);
    EXPECT_EQ(job.label.name, "train");
    ASSERT_EQ(job.ranks.size(), 3u);
    EXPECT_EQ(job.ranks[0].host + job.ranks[1].host, "alphabeta");
    EXPECT_EQ(job.ranks[2].pid, 102);
  }
}

TEST_F(StatusServiceTest, SilentAgentIsReportedAndNotAskedAgain) {
  const base::Fd first = connect();
  add_all_of_beta();
  service_.reply_if_due();
  EXPECT_FALSE(service_.deadline().is_never()) << "the reply of alpha is awaited";
  EXPECT_LE(service_.deadline().remaining(), base::kAgentStatusTimeout);
  while (!service_.deadline().is_never()) service_.reply_if_due();
  const protocol::JobStatus job = reply_to(first);
  ASSERT_EQ(job.ranks.size(), 3u);
  EXPECT_EQ(job.ranks[0].state, RankState::kUnknown);
  EXPECT_EQ(job.ranks[0].host, "alpha");
  EXPECT_EQ(job.ranks[1].state, RankState::kRunning);

  const base::Fd second = connect();
  EXPECT_EQ(count_requests(0), 1u) << "the first request only";
  EXPECT_EQ(count_requests(1), 2u);
  add_all_of_beta();
  add(0, 0);  // the reply to the first request
  service_.on_done(0);
  service_.reply_if_due();
  EXPECT_EQ(reply_to(second).ranks.at(0).state, RankState::kRunning);
  const base::Fd third = connect();
  EXPECT_EQ(count_requests(0), 1u) << "asked again after its reply";
}

TEST_F(StatusServiceTest, RanksOfEndedAgentsAreExitedOrUnknown) {
  service_.on_agent_end(0, true);
  outputs_[0].reset();
  agents_[0].read();  // the end of its output
  const base::Fd connection = connect();
  service_.on_agent_end(1, false);
  service_.reply_if_due();
  const protocol::JobStatus job = reply_to(connection);
  ASSERT_EQ(job.ranks.size(), 3u);
  EXPECT_EQ(job.ranks[0].state, RankState::kExited);
  EXPECT_EQ(job.ranks[1].state, RankState::kUnknown);
}

TEST_F(StatusServiceTest, UnexpectedFramesAreRejected) {
  EXPECT_THROW(add(0, 0), base::Error) << "without a request";
  EXPECT_THROW(service_.on_done(0), base::Error);
  const base::Fd connection = connect();
  EXPECT_THROW(add(0, 1), base::Error) << "a rank of another host";
  EXPECT_THROW(add(1, 0), base::Error);
  EXPECT_THROW(add(1, 3), base::Error);
  add(0, 0);
  EXPECT_THROW(add(0, 0), base::Error) << "more ranks than the host has";
}

}  // namespace
}  // namespace lockstep::launcher::supervise
