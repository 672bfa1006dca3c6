#include "lockstep/launch/protocol/status_messages.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>

#include "lockstep/base/error.h"
#include "lockstep/base/net/abstract_socket.h"
#include "lockstep/launch/protocol/status_socket.h"

namespace lockstep::launcher::protocol {
namespace {

using namespace std::chrono_literals;

RankStatus sample_status() {
  return {.rank = 3,
          .host = "h\x1b",
          .state = RankState::kStopped,
          .pid = 4711,
          .cpu_percent = 150,
          .resident_bytes = std::uint64_t{5} << 40,
          .page = base::telemetry::RankSnapshot{.pid = 4711, .rank = 3, .job = "j", .transport = "shm", .steps = 9}};
}

JobStatus sample_job_status() {
  return {.label = {.id = "id", .name = "na\nme", .launcher_host = "ctl", .launcher_pid = 99, .world_size = 4},
          .is_whole = true,
          .ranks = {sample_status(), {.rank = 1, .host = "h2"}}};
}

TEST(StatusMessages, RankRoundTrips) {
  const RankStatus rank = decode_rank_status(encode_rank_status(sample_status()));
  EXPECT_EQ(rank.rank, 3);
  EXPECT_EQ(rank.host, "h?");  // control characters are removed
  EXPECT_EQ(rank.state, RankState::kStopped);
  EXPECT_EQ(rank.pid, 4711);
  EXPECT_EQ(rank.cpu_percent, 150);
  EXPECT_EQ(rank.resident_bytes, std::uint64_t{5} << 40);
  ASSERT_TRUE(rank.page);
  EXPECT_EQ(rank.page->steps, 9);
  const RankStatus unknown = decode_rank_status(encode_rank_status({.rank = 1, .host = "h2"}));
  EXPECT_EQ(unknown.state, RankState::kUnknown);
  EXPECT_FALSE(unknown.cpu_percent);
  EXPECT_FALSE(unknown.page);
}

TEST(StatusMessages, JobRoundTrips) {
  const JobStatus job = decode_job_status(encode_job_status(sample_job_status()));
  EXPECT_EQ(job.label.id + " " + job.label.name + " " + job.label.launcher_host, "id na?me ctl");
  EXPECT_EQ(job.label.launcher_pid, 99);
  EXPECT_EQ(job.label.world_size, 4);
  EXPECT_TRUE(job.is_whole);
  ASSERT_EQ(job.ranks.size(), 2u);
  EXPECT_EQ(job.ranks[0].pid, 4711);
  EXPECT_EQ(job.ranks[1].host, "h2");
}

TEST(StatusMessages, EveryTruncationIsRejected) {
  const std::string rank = encode_rank_status(sample_status()), job = encode_job_status(sample_job_status());
  for (std::size_t size = 0; size < rank.size(); ++size)
    EXPECT_THROW(decode_rank_status(rank.substr(0, size)), base::Error) << size;
  EXPECT_THROW(decode_rank_status(rank + "x"), base::Error);
  for (std::size_t size = 0; size < job.size(); ++size)
    EXPECT_THROW(decode_job_status(job.substr(0, size)), base::Error) << size;
  EXPECT_THROW(decode_job_status(job + "x"), base::Error);
}

TEST(StatusMessages, UnknownStatesAndVersionsAreRejected) {
  std::string rank = encode_rank_status({.rank = 1, .host = "h"});
  rank[4 + 4 + 1] = 4;  // after the rank, and the host with its length
  EXPECT_THROW(decode_rank_status(rank), base::Error);
  std::string job = encode_job_status(sample_job_status());
  job[7] = '0';
  EXPECT_THROW(decode_job_status(job), base::Error);
}

TEST(StatusSocket, ProcessWithoutAReplyIsReportedAtTheDeadline) {
  constexpr const char* kPrefix = "lockstep-status-test-";
  const base::net::AbstractListener listener(kPrefix);
  const StatusReplies replies = request_job_status(base::Deadline::in(50ms), kPrefix);
  EXPECT_EQ(replies.silent, std::vector<pid_t>{::getpid()});
  EXPECT_TRUE(replies.jobs.empty());
}

TEST(StatusSocket, LargeReplyArrivesAlthoughTheReaderIsLate) {
  const base::net::AbstractListener listener("lockstep-large-reply-");
  const auto connections = base::net::connect_to_all("lockstep-large-reply-");
  ASSERT_EQ(connections.size(), 1u);
  JobStatus job = sample_job_status();
  job.ranks.resize(4096, sample_status());
  const base::Fd accepted = listener.try_accept();
  send_job_status(accepted.get(), job);  // would block if the socket carried it: nobody reads
  EXPECT_EQ(receive_job_status(connections[0].fd.get(), base::Deadline::in(10s)).ranks.size(), 4096u);
}

}  // namespace
}  // namespace lockstep::launcher::protocol
