#include "lockstep/comm/nccl/calls.h"

#include <string>

#include "lockstep/base/error.h"

namespace lockstep::comm::nccl {
namespace {

ncclDataType_t nccl_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble: return ncclDouble;
    case at::kFloat: return ncclFloat;
    case at::kHalf: return ncclHalf;
    case at::kBFloat16: return ncclBfloat16;
    case at::kLong: return ncclInt64;
    case at::kInt: return ncclInt32;
    case at::kChar: return ncclInt8;
    case at::kByte:
    case at::kBool: return ncclUint8;  // bool is sent and reduced as bytes
    default:
      throw base::UsageError("nccl: dtype " + std::string(c10::toString(dtype)) + "; expected one that Group accepts");
  }
}

ncclRedOp_t nccl_op(const Collective& op, at::ScalarType dtype) {
  const bool logical = dtype == at::kBool;
  switch (op.op) {
    case ReduceOp::kSum: return logical ? ncclMax : ncclSum;
    case ReduceOp::kMean: return ncclAvg;
    case ReduceOp::kMin: return ncclMin;
    case ReduceOp::kMax: return ncclMax;
    case ReduceOp::kProduct: return logical ? ncclMin : ncclProd;
  }
  throw base::UsageError("nccl: unknown reduce operator " + std::to_string(static_cast<int>(op.op)));
}

/// The buffers of an operation, and the number of elements of one rank's part.
struct CallArguments {
  explicit CallArguments(const Collective& op)
      : part(op.output.defined() && (op.kind == CollectiveKind::kReduceScatter || op.kind == CollectiveKind::kScatter ||
                                     op.kind == CollectiveKind::kRecv)
                 ? op.output
                 : op.input),
        from(op.input.defined() ? static_cast<const char*>(op.input.const_data_ptr()) : nullptr),
        to(op.output.defined() ? static_cast<char*>(op.output.mutable_data_ptr()) : nullptr) {}

  const at::Tensor& part;
  const char* from;
  char* to;
  const std::size_t count = static_cast<std::size_t>(part.numel());
  const ncclDataType_t type = nccl_type(part.scalar_type());
};

/// Issues gather, scatter and all_to_all as one group of sends and receives.
ncclResult_t issue_point_to_point(const Collective& op, ncclComm_t comm, cudaStream_t stream, int rank, int size) {
  const NcclLibrary& nccl = NcclLibrary::loaded();
  const CallArguments arguments(op);
  const bool at_root = op.root == rank;
  const bool all = op.kind == CollectiveKind::kAllToAll;
  const std::size_t count = arguments.count / (all ? static_cast<std::size_t>(size) : 1);
  const std::size_t bytes = count * arguments.part.element_size();
  ncclResult_t result = nccl.group_start();
  const auto record_error = [&](ncclResult_t next) {
    if (result == ncclSuccess || result == ncclInProgress) result = next;
  };
  for (int peer = 0; peer < size; ++peer) {
    const auto offset = static_cast<std::size_t>(peer) * bytes;
    if (all || (op.kind == CollectiveKind::kScatter && at_root))
      record_error(nccl.send(arguments.from + offset, count, arguments.type, peer, comm, stream));
    if (all || (op.kind == CollectiveKind::kGather && at_root))
      record_error(nccl.recv(arguments.to + offset, count, arguments.type, peer, comm, stream));
  }
  if (op.kind == CollectiveKind::kGather)
    record_error(nccl.send(arguments.from, count, arguments.type, op.root, comm, stream));
  if (op.kind == CollectiveKind::kScatter)
    record_error(nccl.recv(arguments.to, count, arguments.type, op.root, comm, stream));
  record_error(nccl.group_end());
  return result;
}

}  // namespace

std::string describe_call(const Collective& op) {
  const std::string what = describe(op.input.defined() ? op.input : op.output);
  const std::string reduce = ", " + std::string(name(op.op)), root = ", root " + std::to_string(op.root);
  switch (op.kind) {
    case CollectiveKind::kAllReduce: return "ncclAllReduce(" + what + reduce + ")";
    case CollectiveKind::kReduce: return "ncclReduce(" + what + reduce + root + ")";
    case CollectiveKind::kBroadcast: return "ncclBroadcast(" + what + root + ")";
    case CollectiveKind::kAllGather: return "ncclAllGather(" + what + ")";
    case CollectiveKind::kReduceScatter: return "ncclReduceScatter(" + what + reduce + ")";
    case CollectiveKind::kSend: return "ncclSend(" + what + ")";
    case CollectiveKind::kRecv: return "ncclRecv(" + what + ")";
    case CollectiveKind::kGather:
    case CollectiveKind::kScatter:
    case CollectiveKind::kAllToAll: return "ncclSend and ncclRecv (" + std::string(name(op.kind)) + ", " + what + ")";
    case CollectiveKind::kBarrier: break;
  }
  throw base::UsageError("nccl: unsupported operation " + std::to_string(static_cast<int>(op.kind)));
}

ncclResult_t enqueue(const Collective& op, ncclComm_t comm, cudaStream_t stream, int rank, int size) {
  const NcclLibrary& nccl = NcclLibrary::loaded();
  const CallArguments n(op);
  const ncclRedOp_t reduce = nccl_op(op, n.part.scalar_type());
  switch (op.kind) {
    case CollectiveKind::kAllReduce: return nccl.all_reduce(n.from, n.to, n.count, n.type, reduce, comm, stream);
    case CollectiveKind::kReduce: return nccl.reduce(n.from, n.to, n.count, n.type, reduce, op.root, comm, stream);
    case CollectiveKind::kBroadcast: return nccl.broadcast(n.from, n.to, n.count, n.type, op.root, comm, stream);
    case CollectiveKind::kAllGather: return nccl.all_gather(n.from, n.to, n.count, n.type, comm, stream);
    case CollectiveKind::kReduceScatter:
      return nccl.reduce_scatter(n.from, n.to, n.count, n.type, reduce, comm, stream);
    case CollectiveKind::kSend: return nccl.send(n.from, n.count, n.type, op.root, comm, stream);
    case CollectiveKind::kRecv: return nccl.recv(n.to, n.count, n.type, op.root, comm, stream);
    case CollectiveKind::kGather:
    case CollectiveKind::kScatter:
    case CollectiveKind::kAllToAll: return issue_point_to_point(op, comm, stream, rank, size);
    case CollectiveKind::kBarrier: break;  // without tensors: DeviceTransport passes it to the host's transport
  }
  throw base::UsageError("nccl: unsupported operation " + std::to_string(static_cast<int>(op.kind)));
}

}  // namespace lockstep::comm::nccl
