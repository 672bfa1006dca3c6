#include "lockstep/comm/interface/transport.h"

#include <utility>

namespace lockstep::comm {

Capabilities everything_on_cpu(std::vector<at::ScalarType> wires) {
  return {
      .kinds = {Kind::kAllReduce, Kind::kReduce, Kind::kBroadcast, Kind::kAllGather, Kind::kReduceScatter,
                Kind::kGather, Kind::kScatter, Kind::kAllToAll, Kind::kSend, Kind::kRecv, Kind::kBarrier},
      .dtypes = {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kChar, at::kByte,
                 at::kBool},
      .devices = {at::kCPU},
      .wires = std::move(wires),
  };
}

}  // namespace lockstep::comm
