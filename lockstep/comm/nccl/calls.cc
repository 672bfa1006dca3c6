#include "lockstep/comm/nccl/calls.h"

namespace lockstep::comm {
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
    default: return ncclUint8;  // bool moves and is reduced as bytes
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
  return ncclSum;
}

/// Where an operation's numbers are, and how many a rank has of them.
struct Numbers {
  explicit Numbers(const Collective& op)
      : part(op.output.defined() &&
                     (op.kind == Kind::kReduceScatter || op.kind == Kind::kScatter || op.kind == Kind::kRecv)
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

/// gather, scatter and all_to_all: what each rank sends to each.
ncclResult_t issue_by_pairs(const Collective& op, ncclComm_t comm, cudaStream_t stream, int rank, int size) {
  const NcclLibrary& nccl = NcclLibrary::loaded();
  const Numbers numbers(op);
  const bool at_root = op.root == rank;
  const bool all = op.kind == Kind::kAllToAll;
  const std::size_t count = numbers.count / (all ? static_cast<std::size_t>(size) : 1);
  const std::size_t bytes = count * numbers.part.element_size();
  ncclResult_t result = nccl.group_start();
  const auto keep = [&](ncclResult_t next) {
    if (result == ncclSuccess || result == ncclInProgress) result = next;
  };
  for (int peer = 0; peer < size; ++peer) {
    const auto place = static_cast<std::size_t>(peer) * bytes;
    if (all || (op.kind == Kind::kScatter && at_root))
      keep(nccl.send(numbers.from + place, count, numbers.type, peer, comm, stream));
    if (all || (op.kind == Kind::kGather && at_root))
      keep(nccl.recv(numbers.to + place, count, numbers.type, peer, comm, stream));
  }
  if (op.kind == Kind::kGather) keep(nccl.send(numbers.from, count, numbers.type, op.root, comm, stream));
  if (op.kind == Kind::kScatter) keep(nccl.recv(numbers.to, count, numbers.type, op.root, comm, stream));
  keep(nccl.group_end());
  return result;
}

}  // namespace

std::string call_of(const Collective& op) {
  const std::string what = describe(op.input.defined() ? op.input : op.output);
  const std::string reduce = ", " + std::string(name(op.op)), root = ", root " + std::to_string(op.root);
  switch (op.kind) {
    case Kind::kAllReduce: return "ncclAllReduce(" + what + reduce + ")";
    case Kind::kReduce: return "ncclReduce(" + what + reduce + root + ")";
    case Kind::kBroadcast: return "ncclBroadcast(" + what + root + ")";
    case Kind::kAllGather: return "ncclAllGather(" + what + ")";
    case Kind::kReduceScatter: return "ncclReduceScatter(" + what + reduce + ")";
    case Kind::kSend: return "ncclSend(" + what + ")";
    case Kind::kRecv: return "ncclRecv(" + what + ")";
    default: return "ncclSend and ncclRecv (" + std::string(name(op.kind)) + ", " + what + ")";
  }
}

ncclResult_t issue(const Collective& op, ncclComm_t comm, cudaStream_t stream, int rank, int size) {
  const NcclLibrary& nccl = NcclLibrary::loaded();
  const Numbers n(op);
  const ncclRedOp_t reduce = nccl_op(op, n.part.scalar_type());
  switch (op.kind) {
    case Kind::kAllReduce: return nccl.all_reduce(n.from, n.to, n.count, n.type, reduce, comm, stream);
    case Kind::kReduce: return nccl.reduce(n.from, n.to, n.count, n.type, reduce, op.root, comm, stream);
    case Kind::kBroadcast: return nccl.broadcast(n.from, n.to, n.count, n.type, op.root, comm, stream);
    case Kind::kAllGather: return nccl.all_gather(n.from, n.to, n.count, n.type, comm, stream);
    case Kind::kReduceScatter: return nccl.reduce_scatter(n.from, n.to, n.count, n.type, reduce, comm, stream);
    case Kind::kSend: return nccl.send(n.from, n.count, n.type, op.root, comm, stream);
    case Kind::kRecv: return nccl.recv(n.to, n.count, n.type, op.root, comm, stream);
    default: return issue_by_pairs(op, comm, stream, rank, size);
  }
}

}  // namespace lockstep::comm
