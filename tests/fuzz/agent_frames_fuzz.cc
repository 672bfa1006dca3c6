// Fuzzes the stream between launcher and agent: splits it into frames and decodes each frame according to its kind.
#include <cstddef>
#include <cstdint>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/launch/doctor/doctor_messages.h"
#include "lockstep/launch/protocol/frames.h"

using namespace lockstep::launcher;

namespace {

void read(const Frame& frame) {
  const std::string& bytes = frame.payload;
  switch (frame.kind) {
    case FrameKind::kJob: decode_job(bytes); break;
    case FrameKind::kStop: decode_stop(bytes); break;
    case FrameKind::kWriteStacks: decode_ranks(bytes); break;
    case FrameKind::kRouteRequest: decode_route_request(bytes); break;
    case FrameKind::kRouteReply: decode_route_reply(bytes); break;
    case FrameKind::kProbeRequest: decode_probe_request(bytes); break;
    case FrameKind::kProbeReply: decode_probe_failures(bytes); break;
    case FrameKind::kHostInfo: decode_host_info(bytes); break;
    case FrameKind::kRefused: decode_texts(bytes, 2); break;
    case FrameKind::kStartFailed: decode_numbers(bytes, 2); break;
    case FrameKind::kRankHealth: decode_rank_health(bytes); break;
    case FrameKind::kSnapshot: decode_snapshot(bytes); break;
    case FrameKind::kRankExited: decode_rank_exit(bytes); break;
    case FrameKind::kHostFactsRequest: decode_host_facts_request(bytes); break;
    case FrameKind::kHostFacts: decode_host_facts(bytes); break;
    case FrameKind::kListenRequest: decode_listen_request(bytes); break;
    case FrameKind::kListenReply: decode_listen_reply(bytes); break;
    case FrameKind::kMeasureRequest: decode_measure_request(bytes); break;
    case FrameKind::kLinkSpeed: decode_link_speed(bytes); break;
    case FrameKind::kSignal:
    case FrameKind::kClockReply:
    case FrameKind::kStarted:
    case FrameKind::kCheckpointSaved:
    case FrameKind::kOutputDropped:
    case FrameKind::kUnkillable: decode_numbers(bytes, 1); break;
    case FrameKind::kSnapshotRequest:
    case FrameKind::kClockRequest:
    case FrameKind::kStdout:
    case FrameKind::kStderr:
    case FrameKind::kAlive:
    case FrameKind::kSnapshotsDone:
    case FrameKind::kDone: break;  // no value is decoded
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 1) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  FrameReader reader(1 << 16);
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
