#include "lockstep/comm/seam/transport.h"

namespace lockstep::comm {

Capabilities everything_on_cpu() {
  return {
      .kinds = {Kind::kAllReduce, Kind::kReduce, Kind::kBroadcast, Kind::kAllGather, Kind::kReduceScatter, Kind::kGather, Kind::kScatter,
                Kind::kAllToAll, Kind::kSend, Kind::kRecv, Kind::kBarrier},
      .dtypes = {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kChar, at::kByte, at::kBool},
      .devices = {at::kCPU},
  };
}

}  // namespace lockstep::comm
