#include "python/src/host_operations.h"

#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/bitwise_or.h>
#include <ATen/ops/bitwise_xor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/sparse_coo_tensor.h>

#include <algorithm>
#include <numeric>

#include "lockstep/base/error.h"
#include "lockstep/comm/group_access.h"
#include "lockstep/comm/interface/collective.h"

namespace lockstep::python {

using comm::CallOptions;
using comm::Group;
using comm::ReduceOp;

namespace {

constexpr std::int64_t kRoundBytes = std::int64_t{8} << 20;  // of an all_to_all of unequal parts, in each direction

at::Tensor as_accepted(const at::Tensor& line) {
  at::ScalarType dtype = at::toRealValueType(line.scalar_type());
  if (comm::name(dtype) == "?") dtype = at::kByte;
  return dtype == line.scalar_type() ? line : line.view(dtype);
}

/// What surrounds the reduction of a Group in one of c10d.
struct Steps {
  ReduceOp op = ReduceOp::kSum;
  at::Tensor factor;         ///< what each rank's elements are multiplied by before; undefined: nothing
  std::int64_t divisor = 1;  ///< what integers are divided by afterwards, toward zero as NCCL does
  CallOptions options;

  void begin(at::Tensor line) const {
    if (factor.defined()) line.mul_(factor);
  }
  void finish(at::Tensor line) const {
    if (divisor != 1) line.div_(divisor, "trunc");
  }
};

Steps steps_of(const Group& group, const c10d::ReduceOp& op, at::ScalarType dtype, CallOptions options) {
  if (const auto plain = to_reduce_op(op); plain && (plain != ReduceOp::kMean || at::isFloatingType(dtype)))
    return {.op = *plain, .factor = {}, .options = std::move(options)};
  Steps steps{.factor = {}, .options = std::move(options)};
  if (op == c10d::ReduceOp::AVG) {
    steps.divisor = group.size();
    steps.options.name = "AVG";  // for the comparison with other ranks
    return steps;
  }
  const auto* supplement = static_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  steps.factor = supplement->tensor_factor.defined() ? supplement->tensor_factor.to(at::kCPU, dtype)
                                                     : at::scalar_tensor(supplement->double_factor, dtype);
  steps.options.name = "PREMUL_SUM";
  return steps;
}

bool is_on_bits(const c10d::ReduceOp& op) {
  return op == c10d::ReduceOp::BAND || op == c10d::ReduceOp::BOR || op == c10d::ReduceOp::BXOR;
}

void all_reduce_bits(const Group& group, at::Tensor line, c10d::ReduceOp::RedOpType op, const CallOptions& options) {
  const at::Tensor all = at::empty({group.size(), line.numel()}, line.options());
  group.all_gather(all, line, options);
  line.copy_(all[0]);
  for (int rank = 1; rank < group.size(); ++rank) {
    if (op == c10d::ReduceOp::BAND)
      line.bitwise_and_(all[rank]);
    else if (op == c10d::ReduceOp::BOR)
      line.bitwise_or_(all[rank]);
    else
      line.bitwise_xor_(all[rank]);
  }
}

}  // namespace

at::Tensor flat(const at::Tensor& tensor) { return as_accepted(tensor.contiguous().view({-1})); }

void FlatResult::finish() const {
  if (tensor_.is_contiguous()) return;  // flat() has made a view
  const at::Tensor line = flat_.scalar_type() == tensor_.scalar_type() ? flat_ : flat_.view(tensor_.scalar_type());
  tensor_.copy_(line.view(tensor_.sizes()));
}

Concatenated::Concatenated(const char* call, std::vector<at::Tensor> tensors, bool are_equal)
    : tensors_(std::move(tensors)) {
  std::int64_t count = 0;
  for (const at::Tensor& tensor : tensors_) {
    if (tensor.scalar_type() != tensors_[0].scalar_type() || (are_equal && tensor.numel() != tensors_[0].numel()))
      throw base::UsageError(std::string(call) + ": the list has " + comm::describe(tensors_[0]) + " and " +
                             comm::describe(tensor) + "; expected equal dtypes" +
                             (are_equal ? " and numbers of elements" : ""));
    count += tensor.numel();
  }
  flat_ = as_accepted(
      at::empty({count}, tensors_.empty() ? at::TensorOptions() : tensors_[0].options().memory_format(std::nullopt)));
}

void Concatenated::copy_from_tensors() {
  std::int64_t at = 0;
  for (const at::Tensor& tensor : tensors_) {
    const at::Tensor line = flat(tensor);
    flat_.narrow(0, at, line.numel()).copy_(line);
    at += line.numel();
  }
}

void Concatenated::copy_to_tensors() const {
  std::int64_t at = 0;
  for (const at::Tensor& tensor : tensors_) {
    const FlatResult result(tensor);
    result.flat_tensor().copy_(flat_.narrow(0, at, result.flat_tensor().numel()));
    result.finish();
    at += result.flat_tensor().numel();
  }
}

std::optional<ReduceOp> to_reduce_op(const c10d::ReduceOp& op) {
  switch (static_cast<c10d::ReduceOp::RedOpType>(op)) {
    case c10d::ReduceOp::SUM: return ReduceOp::kSum;
    case c10d::ReduceOp::AVG: return ReduceOp::kMean;
    case c10d::ReduceOp::PRODUCT: return ReduceOp::kProduct;
    case c10d::ReduceOp::MIN: return ReduceOp::kMin;
    case c10d::ReduceOp::MAX: return ReduceOp::kMax;
    case c10d::ReduceOp::BAND:
    case c10d::ReduceOp::BOR:
    case c10d::ReduceOp::BXOR:
    case c10d::ReduceOp::PREMUL_SUM:
    case c10d::ReduceOp::UNUSED: break;
  }
  return std::nullopt;
}

void check_reducible(const at::Tensor& tensor, const c10d::ReduceOp& op, const char* call) {
  const at::ScalarType dtype = tensor.scalar_type();
  const auto check = [&](bool good, const char* expected) {
    if (!good)
      throw base::UsageError(std::string(call) + ": the dtype is " + c10::toString(dtype) + "; expected " + expected);
  };
  if (op == c10d::ReduceOp::UNUSED)
    throw base::UsageError(std::string(call) + ": the backend lockstep does not have this reduction; expected SUM, " +
                           "AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR or PREMUL_SUM");
  if (is_on_bits(op)) return check(at::isIntegralType(dtype, /*includeBool=*/true), "integers for BAND, BOR and BXOR");
  if (op == c10d::ReduceOp::PREMUL_SUM && op.supplement_)
    return check(at::isFloatingType(at::toRealValueType(dtype)) && comm::name(at::toRealValueType(dtype)) != "?",
                 "floating-point numbers for PREMUL_SUM");
  if (at::isComplexType(dtype) && c10d::isComplexViewAsRealAllowed(op)) return;
  if (op == c10d::ReduceOp::AVG) check(dtype != at::kBool, "numbers for AVG");
  check(comm::name(dtype) != "?", "float64, float32, float16, bfloat16, int64, int32, int8, uint8 or bool");
}

void all_reduce(const Group& group, const at::Tensor& line, const c10d::ReduceOp& op, const CallOptions& options) {
  if (is_on_bits(op)) return all_reduce_bits(group, line, op, options);
  const Steps steps = steps_of(group, op, line.scalar_type(), options);
  steps.begin(line);
  group.all_reduce(line, steps.op, steps.options);
  steps.finish(line);
}

void reduce(const Group& group, const at::Tensor& line, int root, const c10d::ReduceOp& op,
            const CallOptions& options) {
  if (is_on_bits(op)) return all_reduce_bits(group, line, op, options);
  const Steps steps = steps_of(group, op, line.scalar_type(), options);
  steps.begin(line);
  group.reduce(line, root, steps.op, steps.options);
  if (group.rank() == root) steps.finish(line);
}

void reduce_scatter(const Group& group, const at::Tensor& to, const at::Tensor& from, const c10d::ReduceOp& op,
                    const CallOptions& options) {
  const at::Tensor source = is_on_bits(op) || op == c10d::ReduceOp::PREMUL_SUM ? from.clone() : from;
  if (is_on_bits(op)) {
    all_reduce_bits(group, source, op, options);
    at::Tensor(to).copy_(source.narrow(0, group.rank() * to.numel(), to.numel()));
    return;
  }
  const Steps steps = steps_of(group, op, to.scalar_type(), options);
  steps.begin(source);
  group.reduce_scatter(to, source, steps.op, steps.options);
  steps.finish(to);
}

void all_reduce_sparse(const Group& group, at::Tensor& tensor, const c10d::ReduceOp& op, const CallOptions& options) {
  if (op != c10d::ReduceOp::SUM) throw base::UsageError("all_reduce: a sparse tensor can be summed only");
  const at::Tensor own = tensor.coalesce();
  const Tensors indices = group.all_gather_unequal(own.indices().contiguous(), options);
  const Tensors values = group.all_gather_unequal(own.values().contiguous(), options);
  at::Tensor sum = at::sparse_coo_tensor(indices[0], values[0], own.sizes());
  for (std::size_t i = 1; i < indices.size(); ++i)
    sum = sum.add(at::sparse_coo_tensor(indices[i], values[i], own.sizes()));
  tensor.copy_(sum.coalesce());
}

const at::Tensor& only(const Tensors& tensors, const char* call) {
  if (tensors.size() != 1)
    throw base::UsageError(std::string(call) + ": " + std::to_string(tensors.size()) + " tensors; expected one");
  return tensors[0];
}

const Tensors& only(const TensorLists& lists, const char* call, int size) {
  if (lists.size() != 1 || static_cast<int>(lists[0].size()) != size)
    throw base::UsageError(std::string(call) + ": the list has " + std::to_string(lists.empty() ? 0 : lists[0].size()) +
                           " tensors; expected one for each of the " + std::to_string(size) + " ranks");
  return lists[0];
}

Tensors split_rows(const at::Tensor& tensor, std::vector<std::int64_t> sizes, int parts) {
  const std::int64_t rows = tensor.size(0);
  if (sizes.empty()) sizes.assign(static_cast<std::size_t>(parts), rows / parts);
  if (static_cast<int>(sizes.size()) != parts)
    throw base::UsageError("all_to_all: " + std::to_string(sizes.size()) + " split sizes; expected " +
                           std::to_string(parts));
  const std::int64_t sum = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
  if (sum != rows)
    throw base::UsageError("all_to_all: parts of " + std::to_string(sum) + " rows of a tensor that has " +
                           std::to_string(rows));
  return tensor.split_with_sizes(sizes);
}

void all_to_all_unequal(const Group& group, const Tensors& outputs, const Tensors& inputs, const CallOptions& options) {
  const int size = group.size();
  const at::Tensor mine = at::empty({size}, at::kLong), all = at::empty({size, size}, at::kLong);
  for (int rank = 0; rank < size; ++rank) mine[rank].fill_(inputs[static_cast<std::size_t>(rank)].numel());
  group.all_gather(all, mine, options);
  for (int rank = 0; rank < size; ++rank) {
    const auto sent = all[rank][group.rank()].item<std::int64_t>();
    const std::int64_t expected = outputs[static_cast<std::size_t>(rank)].numel();
    const int sender = group.global_rank(rank), receiver = group.global_rank(group.rank());
    if (sent != expected)
      comm::GroupAccess::fail(
          group,
          base::DesyncError(base::Cause::kDesync, "all_to_all", receiver, sender,
                            "rank " + std::to_string(sender) + " sends " + std::to_string(sent) + " elements, rank " +
                                std::to_string(receiver) + " expects " + std::to_string(expected),
                            "sender and receiver must pass the same sizes"));
  }
  const auto largest = all.max().item<std::int64_t>();
  if (largest == 0) return;
  // In rounds of equal parts, so that the memory for them does not grow with the largest part.
  const at::TensorOptions like = inputs[0].options().memory_format(std::nullopt);
  const std::int64_t round = std::clamp<std::int64_t>(kRoundBytes / size / inputs[0].element_size(), 1, largest);
  const at::Tensor sent = at::empty({size, round}, like), received = at::empty({size, round}, like);
  Tensors sources, targets;
  for (const at::Tensor& part : inputs) {
    // Outputs are written while inputs are still to be read.
    const bool overlaps =
        std::any_of(outputs.begin(), outputs.end(), [&](const at::Tensor& output) { return output.is_alias_of(part); });
    sources.push_back(overlaps ? part.clone().view({-1}) : part.reshape({-1}));
  }
  for (const at::Tensor& part : outputs)
    targets.push_back(part.is_contiguous() ? part.view({-1}) : at::empty({part.numel()}, like));
  for (std::int64_t begin = 0; begin < largest; begin += round) {
    /// Calls copy(a part's elements of this round, their place in `buffer`).
    const auto for_parts = [&](const Tensors& parts, const at::Tensor& buffer, const auto& copy) {
      for (int rank = 0; rank < size; ++rank) {
        const at::Tensor& part = parts[static_cast<std::size_t>(rank)];
        const std::int64_t count = std::min(round, part.numel() - begin);
        if (count > 0) copy(part.narrow(0, begin, count), buffer[rank].narrow(0, 0, count));
      }
    };
    for_parts(sources, sent, [](const at::Tensor& part, const at::Tensor& place) { place.copy_(part); });
    group.all_to_all(flat(received), flat(sent), options);
    for_parts(targets, received, [](const at::Tensor& part, const at::Tensor& place) { part.copy_(place); });
  }
  for (std::size_t i = 0; i < outputs.size(); ++i)
    if (!outputs[i].is_contiguous()) outputs[i].copy_(targets[i].view(outputs[i].sizes()));
}

}  // namespace lockstep::python
