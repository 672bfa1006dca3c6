#include "lockstep/comm/interface/transport.h"

#include <utility>

namespace lockstep::comm::inline interface {

Capabilities full_cpu_capabilities(std::vector<at::ScalarType> wire_dtypes) {
  return {
      .kinds = {CollectiveKind::kAllReduce, CollectiveKind::kReduce, CollectiveKind::kBroadcast,
                CollectiveKind::kAllGather, CollectiveKind::kReduceScatter, CollectiveKind::kGather,
                CollectiveKind::kScatter, CollectiveKind::kAllToAll, CollectiveKind::kSend, CollectiveKind::kRecv,
                CollectiveKind::kBarrier},
      .dtypes = {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kChar, at::kByte,
                 at::kBool},
      .devices = {at::kCPU},
      .wire_dtypes = std::move(wire_dtypes),
  };
}

}  // namespace lockstep::comm::inline interface
