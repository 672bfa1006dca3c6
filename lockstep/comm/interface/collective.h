// An operation between ranks, as data. Group makes one; it is checked, recorded and timed there; a Transport only
// carries it out.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/deadline.h"

namespace c10 {
struct Event;
}

namespace lockstep::comm {

enum class CollectiveKind : std::uint8_t {
  kAllReduce,
  kReduce,
  kBroadcast,
  kAllGather,
  kReduceScatter,
  kGather,
  kScatter,
  kAllToAll,
  kSend,
  kRecv,
  kBarrier,
};

enum class ReduceOp : std::uint8_t { kSum, kMean, kMin, kMax, kProduct };

/// "all_reduce", ...
std::string_view name(CollectiveKind kind);
/// "sum", ...
std::string_view name(ReduceOp op);
/// "float32", ...; "?" for a dtype that no operation takes.
std::string_view name(at::ScalarType dtype);

/// What a transport is asked for. Tensors are contiguous and on the transport's device; n is the number of elements of
/// one rank's part, w the world size:
///
///   kind              input            output
///   all_reduce        [n]              the same tensor, on every rank
///   reduce            [n]              the same tensor, on `root`; undefined contents elsewhere
///   broadcast         [n] of `root`    the same tensor, on every rank
///   all_gather        [n]              [w * n]
///   reduce_scatter    [w * n]          [n]
///   gather            [n]              [w * n] on `root`, undefined tensor elsewhere
///   scatter           [w * n] on root  [n]
///   all_to_all        [w * n]          [w * n]
///   send, recv        [n]              [n]; `root` is the peer
///   barrier           none             none
struct Collective {
  CollectiveKind kind = CollectiveKind::kBarrier;
  std::string name;  ///< the user's, or a parameter's; may be empty
  at::Tensor input;
  at::Tensor output;
  ReduceOp op = ReduceOp::kSum;
  int root = 0;
  at::ScalarType wire =
      at::kFloat;  ///< float32, bfloat16 or float16: what the float32 tensor of an all_reduce crosses between hosts as
  std::uint64_t seq = 0;     ///< number of this operation on its channel, from 1
  std::uint64_t record = 0;  ///< its number in the flight recorder of this process
  base::Deadline deadline = base::Deadline::never();
  std::shared_ptr<c10::Event> after;  ///< of tensors on a GPU, what must come before; null: all that is on the current
                                      ///< stream of the thread that starts it
};

/// "float32[64,3]".
std::string describe(const at::Tensor& tensor);
/// "all_reduce(fc.weight)#12": as in a FATAL line. Without a name "all_reduce#12".
std::string label(const Collective& op);

}  // namespace lockstep::comm
