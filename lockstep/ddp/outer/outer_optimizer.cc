// Buckets go through the stages send, combine and apply. While one is on its way, the next is encoded.
#include "lockstep/ddp/outer/outer_optimizer.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/ddp/outer/payload.h"

namespace lockstep::ddp::inline outer {
namespace {

using base::UsageError;
using checkpoint::StateDict;
using checkpoint::value_of;

constexpr std::int64_t kBucketNumbers = std::int64_t{8} << 20;
constexpr std::int64_t kParallelNumbers = 1 << 16;  // for one thread, at least

// Names in the state.
constexpr const char* kHost = "host";
constexpr const char* kHosts = "hosts";
constexpr const char* kSlices = "slices";
constexpr const char* kCopy = "copy";
constexpr const char* kMomentum = "momentum";
constexpr const char* kError = "error";
constexpr const char* kOwnerError = "owner_error";

/// Elementwise work must be reals on the CPU; complex numbers are pairs of them.
at::Tensor reals(const at::Tensor& tensor) { return tensor.is_complex() ? at::view_as_real(tensor) : tensor; }
std::int64_t numbers_of(const at::Tensor& tensor) { return tensor.numel() * (tensor.is_complex() ? 2 : 1); }

float* data_of(const at::Tensor& tensor) { return tensor.mutable_data_ptr<float>(); }

/// The best rates of Charles and others, 2025, https://arxiv.org/abs/2503.09799, which depend on the number of hosts.
double default_rate(int num_hosts) { return num_hosts == 1 ? 0.5 : num_hosts == 2 ? 0.6 : num_hosts <= 4 ? 0.7 : 0.9; }

template <typename Number>
void require(bool is_right, const char* name, Number value, const char* expected) {
  if (!is_right)
    throw UsageError(std::string("DdpOptions.outer: ") + name + " is " + std::to_string(value) + "; expected " +
                     expected);
}

void check(const DiLoCo& method) {
  require(method.learning_rate >= 0 && std::isfinite(method.learning_rate), "learning_rate", method.learning_rate,
          "a finite number of 0 or more");
  require(method.momentum >= 0 && method.momentum < 1, "momentum", method.momentum, "0 or more, less than 1");
  require(method.warm_up >= 0, "warm_up", method.warm_up, "0 or more");
}
void check(const SparseLoCo& method) {
  require(method.learning_rate > 0 && std::isfinite(method.learning_rate), "learning_rate", method.learning_rate,
          "a finite number above 0");
  require(method.error_decay >= 0 && method.error_decay <= 1, "error_decay", method.error_decay, "0 to 1");
  require(method.keep >= 1 && method.keep <= kSparseChunk, "keep", method.keep, "1 to 4096");
  require(method.warm_up >= 0, "warm_up", method.warm_up, "0 or more");
}
[[noreturn]] void check(std::monostate) { throw UsageError("OuterOptimizer: the method is a mean"); }

at::Tensor zeros(std::int64_t count) { return at::zeros({count}, at::kFloat); }
at::Tensor bytes(std::int64_t count) { return at::empty({count}, at::kByte); }

}  // namespace

OuterOptimizer::OuterOptimizer(OuterMethod method, HostExchange exchange, Store store)
    : method_(method),
      exchange_(std::move(exchange)),
      store_(std::move(store)),
      learning_rate_([&] {
        std::visit([](const auto& options) { check(options); }, method);
        if (const auto* sparse = std::get_if<SparseLoCo>(&method)) return sparse->learning_rate;
        const double rate = std::get<DiLoCo>(method).learning_rate;
        return rate > 0 ? rate : default_rate(exchange_.num_hosts);
      }()),
      momentum_(is_diloco() ? std::get<DiLoCo>(method).momentum : 0),
      loses_(!is_diloco() || std::get<DiLoCo>(method).payload != Payload::kFloat32) {}

void OuterOptimizer::begin(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  buckets_.clear();
  // Parts of a slice, one for each host, are whole blocks.
  const std::int64_t unit = kPayloadBlock * exchange_.num_hosts;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::int64_t numel = numbers_of(tensors[i]);
    // A bucket has at least one number.
    if (buckets_.empty() || (buckets_.back().numel > 0 && numel > 0 && buckets_.back().numel + numel > kBucketNumbers))
      buckets_.push_back({.first = i});
    buckets_.back().numel += numel;
    buckets_.back().last = i + 1;
  }
  for (Bucket& bucket : buckets_) {
    const std::int64_t round_up = unit * exchange_.num_slices;
    bucket.slice = (bucket.numel + round_up - 1) / round_up * unit;
    if (!has_slice()) continue;
    bucket.copy = zeros(bucket.slice);
    for_each_piece(bucket, tensors, [&](std::size_t i, std::int64_t from, std::int64_t to, std::int64_t count) {
      bucket.copy.narrow(0, to, count).copy_(reals(tensors[i]).reshape({-1}).narrow(0, from, count));
    });
    if (is_diloco()) {
      if (momentum_ > 0) bucket.momentum = zeros(bucket.slice);
      bucket.owner_error = zeros(bucket.slice / exchange_.num_hosts);
    }
    bucket.error = zeros(bucket.slice);
  }
}

/// Calls use(index of a tensor, first number in it, first number in this rank's slice, count) for what lies in the
/// slice.
void OuterOptimizer::for_each_piece(const Bucket& bucket, const std::vector<at::Tensor>& tensors,
                                    const Piece& use) const {
  const std::int64_t begin = exchange_.slice * bucket.slice, end = begin + bucket.slice;
  std::int64_t first = 0;
  for (std::size_t i = bucket.first; i < bucket.last; ++i) {
    const std::int64_t last = first + numbers_of(tensors[i]);
    const std::int64_t from = std::max(first, begin), until = std::min(last, end);
    if (from < until) use(i, from - first, from - begin, until - from);
    first = last;
  }
}

/// Adds what this host has learned since the last round, with the sign of a gradient, to `bucket.error`. A parameter of
/// 16 bits began at the rounded copy.
void OuterOptimizer::add_difference(Bucket& bucket, const std::vector<at::Tensor>& tensors) const {
  for_each_piece(bucket, tensors, [&](std::size_t i, std::int64_t from, std::int64_t to, std::int64_t count) {
    const at::Tensor now = reals(tensors[i]).reshape({-1}).narrow(0, from, count);
    const at::Tensor began = bucket.copy.narrow(0, to, count).to(now.scalar_type()).to(at::kFloat);
    bucket.error.narrow(0, to, count).add_(began.sub(now.to(at::kCPU, at::kFloat)));
  });
}

void OuterOptimizer::send(Bucket& bucket, const std::vector<at::Tensor>& tensors) const {
  if (!has_slice()) return;
  const auto* const sparse = std::get_if<SparseLoCo>(&method_);
  if (sparse) bucket.error.mul_(sparse->error_decay);
  add_difference(bucket, tensors);
  if (exchange_.num_hosts == 1) return;
  if (sparse) {
    bucket.sent = bytes(sparse_bytes(bucket.slice, sparse->keep));
    bucket.received = bytes(bucket.sent.numel() * exchange_.num_hosts);
    encode_sparse(data_of(bucket.error), bucket.slice, sparse->keep, bucket.sent.mutable_data_ptr<std::uint8_t>());
    bucket.wait = exchange_.all_gather(bucket.received, bucket.sent);
    return;
  }
  const Payload payload = std::get<DiLoCo>(method_).payload;
  bucket.sent = bytes(payload_bytes(payload, bucket.slice));
  bucket.received = at::empty_like(bucket.sent);
  encode(payload, data_of(bucket.error), bucket.slice, bucket.sent.mutable_data_ptr<std::uint8_t>());
  bucket.wait = exchange_.all_to_all(bucket.received, bucket.sent);
}

/// DiLoCo between several hosts: the mean of this rank's part is encoded and sent to all.
void OuterOptimizer::combine(Bucket& bucket) const {
  const auto* const method = std::get_if<DiLoCo>(&method_);
  if (!has_slice() || !method || exchange_.num_hosts == 1) return;
  bucket.wait();  // bounded: by the timeout of what the hosts exchange through
  const std::int64_t numbers = bucket.slice / exchange_.num_hosts, size = payload_bytes(method->payload, numbers);
  for (int host = 0; host < exchange_.num_hosts; ++host)
    add_decoded(method->payload, bucket.received.const_data_ptr<std::uint8_t>() + host * size, numbers,
                exchange_.weights[static_cast<std::size_t>(host)], data_of(bucket.owner_error));
  const at::Tensor own = bytes(size);
  encode(method->payload, data_of(bucket.owner_error), numbers, own.mutable_data_ptr<std::uint8_t>());
  bucket.wait = exchange_.all_gather(bucket.received, own);
  bucket.sent = own;
}

void OuterOptimizer::apply(Bucket& bucket, const std::vector<at::Tensor>& tensors) const {
  if (has_slice()) {
    at::Tensor mean;
    if (exchange_.num_hosts == 1) {
      mean = bucket.error.clone();
      bucket.error.zero_();
    } else {
      bucket.wait();  // bounded: as above
      mean = zeros(bucket.slice);
      const auto* const sparse = std::get_if<SparseLoCo>(&method_);
      const std::int64_t numbers = bucket.slice / exchange_.num_hosts;
      const std::int64_t size = bucket.received.numel() / exchange_.num_hosts;
      for (int host = 0; host < exchange_.num_hosts; ++host) {
        const std::uint8_t* const from = bucket.received.const_data_ptr<std::uint8_t>() + host * size;
        if (sparse)
          add_sparse(from, bucket.slice, sparse->keep, exchange_.weights[static_cast<std::size_t>(host)],
                     data_of(mean));
        else
          add_decoded(std::get<DiLoCo>(method_).payload, from, numbers, 1, data_of(mean) + host * numbers);
      }
      bucket.wait = nullptr;
      bucket.sent = bucket.received = at::Tensor();
    }
    update(bucket, mean);
  }
  store(bucket, bucket.copy, tensors);
}

/// SGD with Nesterov momentum, as torch.optim.SGD has it. Not by torch's loops, whose rounding depends on the CPU.
void OuterOptimizer::update(Bucket& bucket, const at::Tensor& mean) const {
  float* const copy = data_of(bucket.copy);
  float* const velocity = bucket.momentum.defined() ? data_of(bucket.momentum) : nullptr;
  const float* const gradient = mean.const_data_ptr<float>();
  const auto rate = static_cast<float>(learning_rate_), momentum = static_cast<float>(momentum_);
  at::parallel_for(0, bucket.slice, kParallelNumbers, [&](std::int64_t begin, std::int64_t end) {
    if (!velocity) {
      for (std::int64_t i = begin; i < end; ++i) copy[i] -= rate * gradient[i];
      return;
    }
    for (std::int64_t i = begin; i < end; ++i) {
      velocity[i] = momentum * velocity[i] + gradient[i];
      copy[i] -= rate * (gradient[i] + momentum * velocity[i]);
    }
  });
}

/// Returns the whole vector of which each rank of the host has a slice.
at::Tensor OuterOptimizer::shared(const Bucket& bucket, const at::Tensor& slice) const {
  const at::Tensor all = zeros(bucket.slice * exchange_.num_slices);
  if (has_slice()) all.narrow(0, exchange_.slice * bucket.slice, bucket.slice).copy_(slice);
  if (exchange_.share) exchange_.share(all);
  return all.narrow(0, 0, bucket.numel);
}

void OuterOptimizer::store(const Bucket& bucket, const at::Tensor& slice,
                           const std::vector<at::Tensor>& tensors) const {
  const at::Tensor all = shared(bucket, slice);
  std::int64_t first = 0;
  for (std::size_t i = bucket.first; i < bucket.last; ++i) {
    const at::Tensor values = all.narrow(0, first, numbers_of(tensors[i])).view(reals(tensors[i]).sizes());
    store_(tensors[i].is_complex() ? at::view_as_complex(values.clone()) : values, tensors[i]);
    first += numbers_of(tensors[i]);
  }
}

void OuterOptimizer::round(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  const std::size_t count = buckets_.size();
  for (std::size_t i = 0; i < count + 2; ++i) {
    if (i < count) send(buckets_[i], tensors);
    if (i >= 1 && i <= count) combine(buckets_[i - 1]);
    if (i >= 2) apply(buckets_[i - 2], tensors);
  }
}

void OuterOptimizer::store_copy(const std::vector<at::Tensor>& tensors) const {
  const at::NoGradGuard no_grad;
  for (const Bucket& bucket : buckets_) store(bucket, bucket.copy, tensors);
}

StateDict OuterOptimizer::state_dict() const {
  StateDict state = {{kHost, std::int64_t{exchange_.host}},
                     {kHosts, std::int64_t{exchange_.num_hosts}},
                     {kSlices, std::int64_t{exchange_.num_slices}}};
  const auto add = [&](const char* name, const auto& slice_of) {
    std::vector<at::Tensor> parts;
    for (const Bucket& bucket : buckets_)
      parts.push_back(shared(bucket, has_slice() ? slice_of(bucket) : at::Tensor()));
    state[name] = at::cat(parts);
  };
  add(kCopy, [](const Bucket& bucket) { return bucket.copy; });
  if (momentum_ > 0) add(kMomentum, [](const Bucket& bucket) { return bucket.momentum; });
  if (!loses_) return state;
  add(kError, [](const Bucket& bucket) { return bucket.error; });
  if (is_diloco())
    add(kOwnerError, [&](const Bucket& bucket) {
      const at::Tensor whole = at::zeros_like(bucket.copy);
      const std::int64_t part = bucket.slice / exchange_.num_hosts;
      whole.narrow(0, exchange_.host * part, part).copy_(bucket.owner_error);
      return whole;
    });
  return state;
}

void OuterOptimizer::load_state_dict(const StateDict& state, const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  std::int64_t numbers = 0;
  for (const at::Tensor& tensor : tensors) numbers += numbers_of(tensor);
  std::vector<const char*> names = {kCopy};
  if (momentum_ > 0) names.push_back(kMomentum);
  if (loses_) names.push_back(kError);
  if (loses_ && is_diloco()) names.push_back(kOwnerError);
  for (const char* const name : names) {
    const at::Tensor& saved = value_of<at::Tensor>(state, name);
    if (saved.scalar_type() != at::kFloat || saved.dim() != 1 || saved.numel() != numbers)
      throw UsageError("the state of the outer optimizer has another model's \"" + std::string(name) +
                       "\": " + std::to_string(saved.numel()) + " numbers; expected " + std::to_string(numbers));
  }
  const std::int64_t host = value_of<std::int64_t>(state, kHost), hosts = value_of<std::int64_t>(state, kHosts);
  const bool is_own = host == exchange_.host;
  const bool same_parts =
      hosts == exchange_.num_hosts && value_of<std::int64_t>(state, kSlices) == exchange_.num_slices;
  begin(tensors);
  std::int64_t first = 0;
  for (Bucket& bucket : buckets_) {
    if (has_slice()) {
      const auto slice_of = [&](const char* name) {
        const at::Tensor all = zeros(bucket.slice * exchange_.num_slices);
        all.narrow(0, 0, bucket.numel).copy_(value_of<at::Tensor>(state, name).narrow(0, first, bucket.numel));
        return all.narrow(0, exchange_.slice * bucket.slice, bucket.slice);
      };
      bucket.copy.copy_(slice_of(kCopy));
      if (momentum_ > 0) bucket.momentum.copy_(slice_of(kMomentum));
      if (is_own && loses_) bucket.error.copy_(slice_of(kError));
      if (is_own && loses_ && is_diloco()) {
        const at::Tensor saved = slice_of(kOwnerError);
        const std::int64_t part = bucket.slice / exchange_.num_hosts;
        if (same_parts)
          bucket.owner_error.copy_(saved.narrow(0, exchange_.host * part, part));
        else  // another rank owns it now: the mean lacks it as if this host had lost it
          bucket.error.add_(saved, 1 / exchange_.weights[static_cast<std::size_t>(exchange_.host)]);
      }
    }
    first += bucket.numel;
  }
}

}  // namespace lockstep::ddp::inline outer
