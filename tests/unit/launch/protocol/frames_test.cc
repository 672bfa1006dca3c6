#include "lockstep/launch/protocol/frames.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "lockstep/job/join.h"
#include "tests/support/temp_dir.h"

namespace lockstep::launcher::protocol {
namespace {

using ::testing::HasSubstr;

plan::JobPlan sample_job() {
  plan::JobPlan job;
  job.program = "/bin/\xff\n";
  job.arguments = {"", std::string("a\0b", 3), "'; rm -rf /", std::string(200000, 'x')};
  job.directory = "/d/\xfe";
  job.extends_own_environment = true;
  job.environment = {"A=\x80", "B="};
  job.fail_grace = std::chrono::milliseconds(1234);
  job.run_dir = "runs/example";
  job.label = {.id = "id", .name = "example", .launcher_host = "ctl", .launcher_pid = 99, .world_size = 2};
  job.key = job::JobKey(std::string(32, 'k'));
  job.ranks = {{0, {"RANK=0"}, {"--k=0"}, {0, 7}}, {1, {}, {}, {}}};
  return job;
}

TEST(Frames, JobPlanRoundTrips) {
  const plan::JobPlan job = decode_job(encode_job(sample_job()));
  EXPECT_EQ(job.program, sample_job().program);
  EXPECT_EQ(job.arguments, sample_job().arguments);
  EXPECT_EQ(job.directory, sample_job().directory);
  EXPECT_TRUE(job.extends_own_environment);
  EXPECT_EQ(job.environment, sample_job().environment);
  EXPECT_EQ(job.fail_grace, sample_job().fail_grace);
  EXPECT_EQ(job.run_dir, sample_job().run_dir);
  EXPECT_EQ(job.key.bytes(), sample_job().key.bytes());
  EXPECT_EQ(job.label.id + job.label.name + job.label.launcher_host, "idexamplectl");
  EXPECT_EQ(job.label.launcher_pid, 99);
  EXPECT_EQ(job.label.world_size, 2);
  ASSERT_EQ(job.ranks.size(), 2u);
  EXPECT_EQ(job.ranks[0].cpus, sample_job().ranks[0].cpus);
  EXPECT_EQ(job.ranks[0].environment, sample_job().ranks[0].environment);
  EXPECT_EQ(job.ranks[0].arguments, sample_job().ranks[0].arguments);
  EXPECT_EQ(job.ranks[1].rank, 1);
}

TEST(Frames, EveryTruncationIsRejected) {
  plan::JobPlan job = sample_job();
  job.arguments.back() = "short";
  const std::string bytes = encode_job(job);
  for (std::size_t size = 0; size < bytes.size(); ++size)
    EXPECT_THROW(decode_job(bytes.substr(0, size)), base::Error) << size;
  EXPECT_THROW(decode_job(bytes + "x"), base::Error);
}

TEST(Frames, HugeCountAllocatesNothing) {
  std::string bytes = encode_job(plan::JobPlan{});
  bytes.replace(4, 4, "\xff\xff\xff\xff");  // the number of arguments
  EXPECT_THAT(tests::message_of<base::Error>([&] { decode_job(bytes); }), HasSubstr("4294967295"));
}

TEST(Frames, NetworkMessagesRoundTrip) {
  const plan::HostInfo info = decode_host_info(encode_host_info({.host = "h1",
                                                                 .version = LOCKSTEP_VERSION,
                                                                 .build = job::build_id(""),
                                                                 .cpus = {{0, 0, 0}, {5, 4, 1}},
                                                                 .gpus = 2,
                                                                 .master_port = 77,
                                                                 .visible_gpus = "3,4"}));
  EXPECT_EQ(info.host + " " + info.version + " " + info.visible_gpus, "h1 " LOCKSTEP_VERSION " 3,4");
  EXPECT_EQ(info.gpus, 2);
  EXPECT_EQ(info.master_port, 77);
  ASSERT_EQ(info.cpus.size(), 2u);
  EXPECT_EQ(info.cpus[1].core, 4);
  const RouteRequest request = decode_route_request(
      encoded(RouteRequest{3, std::string(32, '\0'), "^docker0", 5000, {{"10.0.0.1", 5}, {"fd00::1", 65535}}}));
  EXPECT_EQ(request.self, 3);
  EXPECT_EQ(request.token, std::string(32, '\0'));
  EXPECT_EQ(request.interface, "^docker0");
  EXPECT_EQ(request.host_timeout_ms, 5000);
  ASSERT_EQ(request.launcher.size(), 2u);
  EXPECT_EQ(base::net::to_string(request.launcher[1]), "[fd00::1]:65535");
  const RouteReply reply = decoded<RouteReply>(encoded(RouteReply{{{1, 7, {"10.0.0.2", 6}, "eth0"}}, "why"}));
  ASSERT_EQ(reply.routes.size(), 1u);
  EXPECT_EQ(reply.routes[0].launcher, 1);
  EXPECT_EQ(reply.routes[0].connection, 7u);
  EXPECT_EQ(reply.routes[0].address.port, 6);
  EXPECT_EQ(reply.routes[0].interface + reply.error, "eth0why");
  const ProbeRequest probe = decoded<ProbeRequest>(encoded(ProbeRequest{1, {{4, {"a", 1}}, {6, {"b", 2}}}}));
  EXPECT_EQ(probe.launcher, 1);
  EXPECT_EQ(probe.peers.at(1).node, 6);
  EXPECT_EQ(probe.peers.at(1).address.host, "b");
  const auto failures = decoded<ProbeReply>(encoded(ProbeReply{{2, "refused"}}));
  ASSERT_EQ(failures.size(), 1u);
  EXPECT_EQ(failures[0].why, "refused");
  EXPECT_EQ(decode_texts(encode_texts({"a", "b"}), 2).at(1), "b");
  EXPECT_THROW(decode_texts(encode_texts({"a", "b"}), 3), base::Error);
}

TEST(Frames, OtherVersionsDecodePartially) {
  const plan::HostInfo info =
      decode_host_info(encode_host_info({.host = "h1", .version = "9.9", .build = "ab"}) + "fields of version 9.9");
  EXPECT_EQ(info.host + info.version + info.build, "h19.9ab");
  EXPECT_EQ(
      decode_host_info(encode_host_info({.host = "h1", .version = LOCKSTEP_VERSION, .build = "ab"}) + "more").build,
      "ab");
}

TEST(Frames, TextsOfHostsAreMadePrintable) {
  EXPECT_EQ(decode_host_info(encode_host_info({.host = "a\x1b[2Jb"})).host.find('\x1b'), std::string::npos);
  EXPECT_EQ(decode_texts(encode_texts({"\x1b"}), 1)[0].find('\x1b'), std::string::npos);
}

TEST(Frames, FramesAreReassembled) {
  const std::string stream = encode({FrameKind::kStdout, 3, "hello"}) + encode({FrameKind::kDone, -1, ""}) +
                             encode({FrameKind::kStderr, 0, "x"});
  for (std::size_t step = 1; step <= stream.size(); ++step) {
    FrameReader reader(kMaxFrameBytes);
    std::vector<Frame> frames;
    for (std::size_t at = 0; at < stream.size(); at += step) {
      reader.feed(std::string_view(stream).substr(at, step));
      while (auto frame = reader.next()) frames.push_back(*frame);
    }
    ASSERT_EQ(frames.size(), 3u) << step;
    EXPECT_EQ(frames[0].kind, FrameKind::kStdout);
    EXPECT_EQ(frames[0].rank, 3);
    EXPECT_EQ(frames[0].payload, "hello");
    EXPECT_EQ(frames[1].rank, -1);
    EXPECT_EQ(frames[2].payload, "x");
  }
}

TEST(Frames, HeaderIsCheckedBeforeThePayload) {
  FrameReader reader(100);
  reader.feed(encode({FrameKind::kStdout, 0, std::string(101, 'x')}).substr(0, 12));
  EXPECT_THAT(tests::message_of<base::Error>([&] { reader.next(); }), HasSubstr("101 bytes; expected at most 100"));
  FrameReader other(100);
  other.feed(std::string("\0\0\0\0\x63\0\0\0\0\0\0\0", 12));
  EXPECT_THAT(tests::message_of<base::Error>([&] { other.next(); }), HasSubstr("kind 99"));
}

TEST(Frames, StopRankHealthAndRankListsRoundTrip) {
  const StopRequest stop = decoded<StopRequest>(
      encoded(StopRequest{.signal = 15, .notice_period = std::chrono::seconds(1), .grace = std::chrono::seconds(2)}));
  EXPECT_EQ(stop.signal, 15);
  EXPECT_EQ(stop.notice_period, std::chrono::seconds(1));
  EXPECT_EQ(stop.grace, std::chrono::seconds(2));
  const job::health::RankHealth health = decoded<job::health::RankHealth>(encoded(job::health::RankHealth{
      3, std::chrono::milliseconds(5), std::chrono::milliseconds(7), job::health::RankPhase::kBeforeWorld, 'T',
      std::chrono::milliseconds(8), std::chrono::milliseconds(9), true, 10, 11, 12}));
  EXPECT_EQ(health.rank, 3);
  EXPECT_EQ(health.since_heartbeat.count(), 5);
  EXPECT_EQ(health.since_progress.count(), 7);
  EXPECT_EQ(health.phase, job::health::RankPhase::kBeforeWorld);
  EXPECT_EQ(health.process_state, 'T');
  EXPECT_EQ(health.since_report.count(), 8);
  EXPECT_EQ(health.since_activity.count(), 9);
  EXPECT_TRUE(health.is_waiting);
  EXPECT_EQ(health.steps, 10);
  EXPECT_EQ(health.looks, 11);
  EXPECT_EQ(health.pending_looks, 12);
  EXPECT_EQ(decode_ranks(encode_ranks({4, 0, 7})), (std::vector<int>{4, 0, 7}));
  EXPECT_TRUE(decode_ranks("").empty());
  EXPECT_THROW(decode_ranks("123"), base::Error);
}

base::telemetry::RankSnapshot snapshot_with(int running, int finished) {
  base::telemetry::RankSnapshot snapshot{.pid = 4711,
                                         .rank = 2,
                                         .world_size = 4,
                                         .job = "j",
                                         .transport = "shm",
                                         .steps = 9,
                                         .batches = 10,
                                         .gradient_reductions = 11,
                                         .waiting = true,
                                         .has_left = true,
                                         .busy_with = "evaluate",
                                         .live_bytes = 12,
                                         .peak_live_bytes = 13,
                                         .high_water_bytes = 14,
                                         .resident_bytes = 15,
                                         .read_at_ns = 77};
  for (int i = 0; i < running + finished; ++i)
    snapshot.operations.push_back({.number = static_cast<std::uint64_t>(i),
                                   .seq = 5,
                                   .bytes = 6,
                                   .step = 7,
                                   .started = 8,
                                   .ended = i < finished ? 9 : 0,
                                   .channel = "world",
                                   .kind = "barrier",
                                   .dtype = "float32",
                                   .name = "a\x1b]b"});
  return snapshot;
}

TEST(Frames, SnapshotRoundTrips) {
  const base::telemetry::RankSnapshot snapshot = decode_snapshot(encode_snapshot(snapshot_with(1, 1)));
  EXPECT_EQ(snapshot.rank, 2);
  EXPECT_EQ(snapshot.pid, 4711);
  EXPECT_EQ(snapshot.steps, 9);
  EXPECT_TRUE(snapshot.waiting);
  EXPECT_TRUE(snapshot.has_left);
  EXPECT_EQ(snapshot.busy_with, "evaluate");
  EXPECT_EQ(snapshot.read_at_ns, 77);
  EXPECT_EQ(snapshot.gradient_reductions, 11u);
  EXPECT_EQ(snapshot.live_bytes, 12u);
  EXPECT_EQ(snapshot.peak_live_bytes, 13u);
  EXPECT_EQ(snapshot.high_water_bytes, 14u);
  EXPECT_EQ(snapshot.resident_bytes, 15u);
  ASSERT_EQ(snapshot.operations.size(), 2u);
  EXPECT_EQ(snapshot.operations[0].ended, 9);
  EXPECT_TRUE(snapshot.operations[1].is_running());
  EXPECT_EQ(snapshot.operations[1].name, "a?]b");  // control characters are removed
  EXPECT_EQ(snapshot.operations[1].dtype, "float32");
}

TEST(Frames, OperationsAreLimitedPerKind) {
  const base::telemetry::RankSnapshot snapshot = decode_snapshot(encode_snapshot(snapshot_with(40, 4000)));
  ASSERT_EQ(snapshot.operations.size(), 64u);
  EXPECT_EQ(snapshot.operations.front().number, 3968u);
  EXPECT_EQ(snapshot.operations.back().number, 4039u);
}

TEST(Frames, EverySnapshotTruncationIsRejected) {
  const std::string bytes = encode_snapshot(snapshot_with(1, 1));
  for (std::size_t size = 0; size < bytes.size(); ++size)
    EXPECT_THROW(decode_snapshot(bytes.substr(0, size)), base::Error) << size;
  EXPECT_THROW(decode_snapshot(bytes + "x"), base::Error);
}

TEST(Frames, RankExitRoundTrips) {
  const RankExit end = decode_rank_exit(
      encoded(RankExit{.rank = 5, .pid = 4711, .signal = 9, .message = "ValueError: x", .ports = {7}}));
  EXPECT_EQ(end.ports[0], 7);
  EXPECT_EQ(end.rank, 5);
  EXPECT_EQ(end.pid, 4711);
  EXPECT_EQ(end.signal, 9);
  EXPECT_EQ(end.message, "ValueError: x");
  EXPECT_THROW(decode_rank_exit(encoded(RankExit{.message = std::string(5000, 'x')})), base::Error);
  EXPECT_THROW(decode_rank_exit("short"), base::Error);
  EXPECT_EQ(to_text(end), "killed by SIGKILL");
  EXPECT_EQ(end.exit_code(), 137);
  EXPECT_EQ(to_text({0, 1, 7, 0}), "exited with code 7");
  EXPECT_EQ(to_text({0, 1, 0, 50}), "killed by signal 50");
  EXPECT_THROW(decode_numbers("short", 1), base::Error);
}

}  // namespace
}  // namespace lockstep::launcher::protocol
