// The protocol between launcher and agent: frames, and the encoding of their payloads. Both ends are the same program.
// Nevertheless, each end validates received data as if its peer were untrusted.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/job/health/rank_health.h"
#include "lockstep/launch/plan/host_info.h"
#include "lockstep/launch/plan/job_plan.h"
#include "lockstep/launch/protocol/message_codec.h"
#include "lockstep/launch/protocol/network_messages.h"
#include "lockstep/launch/protocol/rank_exit.h"

namespace lockstep::launcher::protocol {

/// The kind of a frame, and its payload.
enum class FrameKind : std::uint32_t {
  // Launcher to agent.
  kJob = 1,          ///< JobPlan; the first frame
  kStart,            ///< empty; starts the ranks. Sent when all agents have replied kPrepared
  kStop,             ///< StopRequest
  kSignal,           ///< one number: a signal for the ranks' processes
  kSnapshotRequest,  ///< empty; the agent replies with a kSnapshot per published page, then kSnapshotsDone
  kRouteRequest,     ///< RouteRequest; before kJob if there are several hosts
  kProbeRequest,     ///< ProbeRequest
  kWriteStacks,      ///< numbers of the ranks whose stacks the agent must write; it delays a later kStop until then
  kOutputAck,        ///< two numbers: the stream (0: stdout, 1: stderr) of `rank`, and how many of its bytes arrived
  kStatusRequest,    ///< empty; the agent replies with a kRankStatus per rank, then kStatusDone
  kStdin,            ///< bytes for the ranks that read the launcher's stdin; empty: its end. One at a time
  // Launcher to agent for `lockstep doctor`, which starts no job; see doctor_messages.h.
  kClockRequest,      ///< empty
  kHostFactsRequest,  ///< HostFactsRequest
  kListenRequest,     ///< ListenRequest
  kMeasureRequest,    ///< MeasureRequest
  // Agent to launcher.
  kHostInfo,         ///< HostInfo; the first frame
  kRouteReply,       ///< RouteReply
  kProbeReply,       ///< ProbeReply
  kClockReply,       ///< one number: the host's clock, in ns since 1970
  kHostFacts,        ///< HostFacts
  kListenReply,      ///< ListenReply
  kLinkSpeed,        ///< LinkSpeed
  kPrepared,         ///< warnings about the environment of the ranks, one per line; no rank is started yet
  kRefused,          ///< two texts: the reason why no rank is started, and a hint
  kStarted,          ///< one number: the pid of `rank`
  kStartFailed,      ///< two numbers: StartStep and errno
  kStdout,           ///< bytes that `rank` has written
  kStderr,           ///< the same
  kPythonLocation,   ///< where the main thread of a rank is whose stacks were written, if it runs Python
  kStacks,           ///< the stacks of a rank, with the reason why there is no file of them
  kUsesLibrary,      ///< the name of a library that a rank has loaded, in which it is alone. At most once
  kRankHealth,       ///< job::health::RankHealth; about once per second
  kLeftBehind,       ///< running processes, "4711 (curl), 4712 (tee)", of `rank`, which has ended; sent before SIGTERM
  kAlive,            ///< empty; about once per second if no other frame is queued
  kCheckpointSaved,  ///< one number: the newest checkpoint that `rank` knows to be durable; sent when it changes
  kSnapshot,         ///< base::telemetry::RankSnapshot
  kSnapshotsDone,    ///< empty
  kRankStatus,       ///< RankStatus; see status_messages.h
  kStatusDone,       ///< empty
  kRankExited,       ///< RankExit; after all output of the rank
  kSignalled,        ///< one number: a signal for the launcher, which an agent in another pod has received
  kStdinTaken,       ///< empty; the ranks have read the last kStdin
  kUnkillable,       ///< one number: the pid of a process that SIGKILL did not end
  kDone,             ///< empty; no process of the job is left; the last frame
};

/// Throws Error kProtocol: the reader does not expect a frame of this kind now.
[[noreturn]] void throw_unexpected(FrameKind kind);

/// A frame. `rank` is -1 if the frame does not belong to a rank.
struct Frame {
  FrameKind kind = FrameKind::kDone;
  int rank = -1;
  std::string payload;
};

inline constexpr std::size_t kMaxFrameBytes = std::size_t{1} << 20;
/// Linux limits the arguments and the environment of a process to 6 MiB.
inline constexpr std::size_t kMaxJobFrameBytes = std::size_t{64} << 20;

/// Encodes a frame as a header (length, kind and rank: 12 bytes, little endian), the payload, and a newline, because
/// srun forwards whole lines only.
std::string encode(const Frame& frame);

/// Splits a stream of bytes into frames.
class FrameReader {
 public:
  explicit FrameReader(std::size_t limit) : limit_(limit) {}
  void feed(std::string_view bytes) { buffer_.append(bytes); }
  /// Returns the next whole frame, or nullopt if bytes are missing. Throws Error kProtocol for a length above the limit
  /// or an unknown kind, before memory is allocated.
  std::optional<Frame> next();

 private:
  std::size_t limit_;
  std::string buffer_;
  std::size_t begin_ = 0;  // index of the first byte that has not been read
};

// encoded() and decoded() of message_codec.h convert the messages whose fields() are in a header. Each function
// decode_X() throws Error kProtocol for anything that encode_X(), or encoded() of its message, does not write.

std::string encode_numbers(const std::vector<std::int64_t>& numbers);
/// Expects exactly `count` numbers.
std::vector<std::int64_t> decode_numbers(std::string_view bytes, std::size_t count);

/// How the agent must end the ranks.
struct StopRequest {
  int signal = 0;
  /// Time before the signal in which ranks that use Lockstep can read the cause and exit by themselves.
  std::chrono::milliseconds notice_period{0};
  std::chrono::milliseconds grace{0};  ///< from the signal to SIGKILL
};
void fields(Is<StopRequest> auto& stop, auto& field) {
  field(stop.signal);
  field(stop.notice_period);
  field(stop.grace);
}

std::string encode_ranks(const std::vector<int>& ranks);
/// Accepts any number of ranks.
std::vector<int> decode_ranks(std::string_view bytes);

void fields(Is<job::health::RankHealth> auto& health, auto& field) {
  field(health.rank);
  field(health.since_heartbeat);
  field(health.since_progress);
  field(health.phase, job::health::RankPhase::kAfterWorld);
  field(health.process_state);
  field(health.since_report);
  field(health.since_activity);
  field(health.is_waiting);
  field(health.steps);
  field(health.looks);
  field(health.pending_looks);
}

/// Encodes at most 32 running operations and the last 32 finished ones.
std::string encode_snapshot(const base::telemetry::RankSnapshot& snapshot);
base::telemetry::RankSnapshot decode_snapshot(std::string_view bytes);

void fields(Is<RankExit> auto& end, auto& field) {
  field(end.rank);
  field(end.pid);
  field(end.code);
  field(end.signal);
  field(end.oom_kills);
  field(end.ports);
  field(Raw{end.message});
}
/// Throws also for a longer error message than an agent sends.
RankExit decode_rank_exit(std::string_view bytes);

std::string encode_host_info(const plan::HostInfo& info);
/// For a HostInfo of another version or build of Lockstep, decodes only the texts: host, version, build, machine and
/// visible_gpus.
plan::HostInfo decode_host_info(std::string_view bytes);

/// Throws also for a host timeout of less than 1 s.
RouteRequest decode_route_request(std::string_view bytes);

std::string encode_texts(const std::vector<std::string>& texts);
/// Expects exactly `count` texts, and makes them printable.
std::vector<std::string> decode_texts(std::string_view bytes, std::size_t count);

void fields(Is<plan::JobLabel> auto& label, auto& field) {
  field(label.id);
  field(label.name);
  field(label.launcher_host);
  field(label.launcher_pid);
  field(label.world_size);
}

std::string encode_job(const plan::JobPlan& job);
plan::JobPlan decode_job(std::string_view bytes);

}  // namespace lockstep::launcher::protocol
