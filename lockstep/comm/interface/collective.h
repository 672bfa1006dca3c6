// Collective: an operation between ranks, as data. A Group makes, checks, records and times it; a Transport executes
// it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/deadline.h"

namespace c10 {
struct Event;
}

namespace lockstep::comm::inline interface {

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

/// The `root` of a recv whose source is not known: Group turns it into a recv from the rank that sends first.
constexpr int kAnySource = -1;

/// Returns "all_reduce", ...
std::string_view name(CollectiveKind kind);
/// Returns "sum", ...
std::string_view name(ReduceOp op);
/// Returns "float32", ...; "?" for a dtype that no operation accepts.
std::string_view name(at::ScalarType dtype);

/// A range of adjacent elements.
struct ElementRange {
  std::size_t first = 0;
  std::size_t count = 0;
};
/// By host, in the order of the hosts' first ranks: the elements of a result that only the ranks of that host need.
using NeededElements = std::vector<std::vector<ElementRange>>;

/// What rounding to int8 has lost of the tensor of an all_reduce that is repeated, and what is added the next time
/// (error feedback): float32 on the CPU, with the sizes that the transport gives them in the first operation. Its owner
/// may read, save and replace it between two operations.
struct ErrorFeedback {
  at::Tensor sent;    ///< of what this rank has sent to others
  at::Tensor result;  ///< of the part of the result that this rank has sent to others
};

/// One operation. Its tensors are contiguous and on a device that the transport supports. In the table, n is the number
/// of elements of one rank's part and w the number of ranks:
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
///   send, recv        [n]              [n]; `root` is the peer, or kAnySource
///   barrier           none             none
struct Collective {
  CollectiveKind kind = CollectiveKind::kBarrier;
  std::string name;  ///< from the caller, or the name of a parameter; may be empty
  at::Tensor input;
  at::Tensor output;
  ReduceOp op = ReduceOp::kSum;
  int root = 0;
  /// The dtype in which a float32 all_reduce sends its data between hosts: float32, bfloat16, float16 or, for sums and
  /// means, int8 (comm/codec/int8.h).
  at::ScalarType wire_dtype = at::kFloat;
  /// Of an all_reduce: a rank's other elements may have any finite value afterwards, so that a transport need not send
  /// them. The same on all ranks; null: all elements.
  std::shared_ptr<const NeededElements> needed;
  std::shared_ptr<ErrorFeedback> error_feedback;  ///< for int8; null: what rounding loses is lost
  std::uint64_t seq = 0;                          ///< number of this operation on its channel, from 1
  std::uint64_t flight_id = 0;                    ///< its number in the flight recorder of this process
  base::Deadline deadline = base::Deadline::never();
  std::string_view hint = {};  ///< for the DesyncError if other ranks wait in other operations; may be empty
  /// For tensors on a GPU: the event that the operation must wait for. If null, it waits for the work on the current
  /// stream of the thread that starts it.
  std::shared_ptr<c10::Event> ready_event;
};

/// Returns "float32[64,3]".
std::string describe(const at::Tensor& tensor);
/// Returns the label that FATAL lines use: "all_reduce(fc.weight)#12", without a name "all_reduce#12".
std::string label(const Collective& op);

}  // namespace lockstep::comm::inline interface
