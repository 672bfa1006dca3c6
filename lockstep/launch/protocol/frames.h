// The bytes between launcher and agent: frames, and the values inside them. Both ends are the same program, but lengths
// are checked as if they were strangers.
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
#include "lockstep/launch/protocol/network_messages.h"
#include "lockstep/launch/protocol/rank_exit.h"

namespace lockstep::launcher {

enum class FrameKind : std::uint32_t {
  // launcher to agent
  kJob = 1,          ///< JobPlan; the first frame
  kStop,             ///< StopRequest
  kSignal,           ///< one number: a signal for the ranks' processes
  kSnapshotRequest,  ///< what have the ranks done? The answer is kSnapshot for each that has shown itself, and
                     ///< kSnapshotsDone
  kRouteRequest,     ///< RouteRequest; before kJob, when there are several hosts
  kProbeRequest,     ///< ProbeRequest
  kWriteStacks,      ///< numbers: ranks whose stacks are to be written; a kStop that comes then waits for them
  // the same, of `lockstep doctor`, which starts no job; doctor_wire.h
  kClockRequest,      ///< nothing: what does its clock say?
  kHostFactsRequest,  ///< HostFactsRequest
  kListenRequest,     ///< ListenRequest
  kMeasureRequest,    ///< MeasureRequest
  // agent to launcher
  kHostInfo,     ///< HostInfo; the first frame
  kRouteReply,   ///< RouteReply
  kProbeReply,   ///< a list of ProbeFailure
  kClockReply,   ///< one number: ns since 1970, by its clock
  kHostFacts,    ///< HostFacts
  kListenReply,  ///< ListenReply
  kLinkSpeed,    ///< LinkSpeed
  kRefused,      ///< two texts: why it starts no rank at all, and a hint
  kStarted,      ///< one number: pid
  kStartFailed,  ///< two numbers: StartStep, errno
  kStdout,       ///< bytes that `rank` wrote
  kStderr,
  kRankHealth,       ///< job::RankHealth; about once a second
  kAlive,            ///< nothing to tell of any rank; about once a second
  kCheckpointSaved,  ///< one number: the newest checkpoint that `rank` knows to be durable, when it is newer than what
                     ///< was told
                     ///< before
  kSnapshot,         ///< base::RankSnapshot
  kSnapshotsDone,
  kRankExited,     ///< RankExit; after all that the rank has written
  kOutputDropped,  ///< one number: bytes of output lost because the launcher did not read
  kUnkillable,     ///< one number: a pid that SIGKILL did not end
  kDone,           ///< no process of the job is left; the last frame
};

struct Frame {
  FrameKind kind = FrameKind::kDone;
  int rank = -1;
  std::string payload;
};

inline constexpr std::size_t kMaxFrameBytes = std::size_t{1} << 20;
inline constexpr std::size_t kMaxJobFrameBytes = std::size_t{64}
                                                 << 20;  ///< arguments and environment are at most 6 MiB on Linux

/// Header (length, kind, rank: 12 bytes, little endian), payload, and a newline: srun passes on what has ended a line.
std::string encode(const Frame& frame);

/// Cuts a stream into frames.
class FrameReader {
 public:
  explicit FrameReader(std::size_t limit) : limit_(limit) {}
  void feed(std::string_view bytes) { buffer_.append(bytes); }
  /// The next whole frame; nothing when bytes are missing. Throws Error kProtocol for a length over the limit or a kind
  /// that does not exist, before memory is taken.
  std::optional<Frame> next();

 private:
  std::size_t limit_;
  std::string buffer_;
  std::size_t begin_ = 0;  // of what is not read yet
};

std::string encode_numbers(const std::vector<std::int64_t>& numbers);
/// Exactly `count` numbers. Throws Error kProtocol.
std::vector<std::int64_t> decode_numbers(std::string_view bytes, std::size_t count);

/// How the ranks are to end.
struct StopRequest {
  int signal = 0;
  std::chrono::milliseconds notice_period{
      0};  ///< for ranks that know of Lockstep: time to learn the cause and to end by themselves, before the signal
  std::chrono::milliseconds grace{0};  ///< from the signal to SIGKILL
};
std::string encode_stop(const StopRequest& stop);
StopRequest decode_stop(std::string_view bytes);

std::string encode_ranks(const std::vector<int>& ranks);
/// As many as there are. Throws Error kProtocol.
std::vector<int> decode_ranks(std::string_view bytes);

std::string encode_rank_health(const job::RankHealth& pulse);
job::RankHealth decode_rank_health(std::string_view bytes);

/// The operations that go on and the last of those that have ended, 32 and 32.
std::string encode_snapshot(const base::RankSnapshot& seen);
base::RankSnapshot decode_snapshot(std::string_view bytes);

std::string encode_rank_exit(const RankExit& end);
RankExit decode_rank_exit(std::string_view bytes);

std::string encode_host_info(const HostInfo& info);
/// Of another version or build only these two are there, and the host. Throws Error kProtocol.
HostInfo decode_host_info(std::string_view bytes);

std::string encode_route_request(const RouteRequest& order);
RouteRequest decode_route_request(std::string_view bytes);
std::string encode_route_reply(const RouteReply& reply);
RouteReply decode_route_reply(std::string_view bytes);
std::string encode_probe_request(const ProbeRequest& order);
ProbeRequest decode_probe_request(std::string_view bytes);
std::string encode_probe_failures(const std::vector<ProbeFailure>& failures);
std::vector<ProbeFailure> decode_probe_failures(std::string_view bytes);

std::string encode_texts(const std::vector<std::string>& texts);
/// Exactly `count` texts, made printable. Throws Error kProtocol.
std::vector<std::string> decode_texts(std::string_view bytes, std::size_t count);

std::string encode_job(const JobPlan& job);
/// Throws Error kProtocol for anything that encode_job() does not write.
JobPlan decode_job(std::string_view bytes);

}  // namespace lockstep::launcher
