// Fuzzes the stream between launcher and agent: splits it into frames and decodes each frame according to its kind.
#include <cstddef>
#include <cstdint>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/launch/doctor/doctor_messages.h"
#include "lockstep/launch/protocol/frames.h"
#include "lockstep/launch/protocol/status_messages.h"

using namespace lockstep::launcher;

namespace {

void read(const protocol::Frame& frame) {
  const std::string& bytes = frame.payload;
  switch (frame.kind) {
    case protocol::FrameKind::kJob: protocol::decode_job(bytes); break;
    case protocol::FrameKind::kStop: protocol::decoded<protocol::StopRequest>(bytes); break;
    case protocol::FrameKind::kWriteStacks: protocol::decode_ranks(bytes); break;
    case protocol::FrameKind::kRouteRequest: protocol::decode_route_request(bytes); break;
    case protocol::FrameKind::kRouteReply: protocol::decoded<protocol::RouteReply>(bytes); break;
    case protocol::FrameKind::kProbeRequest: protocol::decoded<protocol::ProbeRequest>(bytes); break;
    case protocol::FrameKind::kProbeReply: protocol::decoded<protocol::ProbeReply>(bytes); break;
    case protocol::FrameKind::kHostInfo: protocol::decode_host_info(bytes); break;
    case protocol::FrameKind::kRefused: protocol::decode_texts(bytes, 2); break;
    case protocol::FrameKind::kOutputAck:
    case protocol::FrameKind::kStartFailed: protocol::decode_numbers(bytes, 2); break;
    case protocol::FrameKind::kRankHealth: protocol::decoded<lockstep::job::health::RankHealth>(bytes); break;
    case protocol::FrameKind::kSnapshot: protocol::decode_snapshot(bytes); break;
    case protocol::FrameKind::kRankStatus: protocol::decode_rank_status(bytes); break;
    // The frame is empty. Its bytes stand for what `lockstep status` receives, which is not in a frame.
    case protocol::FrameKind::kStatusDone: protocol::decode_job_status(bytes); break;
    case protocol::FrameKind::kRankExited: protocol::decode_rank_exit(bytes); break;
    case protocol::FrameKind::kHostFactsRequest: protocol::decoded<doctor::HostFactsRequest>(bytes); break;
    case protocol::FrameKind::kHostFacts: doctor::decode_host_facts(bytes); break;
    case protocol::FrameKind::kListenRequest: protocol::decoded<doctor::ListenRequest>(bytes); break;
    case protocol::FrameKind::kListenReply: protocol::decoded<doctor::ListenReply>(bytes); break;
    case protocol::FrameKind::kMeasureRequest: protocol::decoded<doctor::MeasureRequest>(bytes); break;
    case protocol::FrameKind::kLinkSpeed: protocol::decoded<doctor::LinkSpeed>(bytes); break;
    case protocol::FrameKind::kSignal:
    case protocol::FrameKind::kSignalled:
    case protocol::FrameKind::kClockReply:
    case protocol::FrameKind::kStarted:
    case protocol::FrameKind::kCheckpointSaved:
    case protocol::FrameKind::kUnkillable: protocol::decode_numbers(bytes, 1); break;
    case protocol::FrameKind::kPythonLocation:  // a text
    case protocol::FrameKind::kStart:
    case protocol::FrameKind::kPrepared:
    case protocol::FrameKind::kSnapshotRequest:
    case protocol::FrameKind::kStatusRequest:
    case protocol::FrameKind::kClockRequest:
    case protocol::FrameKind::kStdin:
    case protocol::FrameKind::kStdinTaken:
    case protocol::FrameKind::kUsesLibrary:
    case protocol::FrameKind::kLeftBehind:
    case protocol::FrameKind::kStacks:
    case protocol::FrameKind::kStdout:
    case protocol::FrameKind::kStderr:
    case protocol::FrameKind::kAlive:
    case protocol::FrameKind::kSnapshotsDone:
    case protocol::FrameKind::kDone: break;  // no value is decoded
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 1) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  protocol::FrameReader reader(1 << 16);
  try {
    for (std::size_t at = 0; at < bytes.size(); at += 1 + data[0]) {
      reader.feed(bytes.substr(at, 1 + data[0]));
      while (const auto frame = reader.next()) {
        try {
          read(*frame);
        } catch (const lockstep::base::Error&) {
        }
      }
    }
  } catch (const lockstep::base::Error&) {
  }
  return 0;
}
