#include "lockstep/ddp/hooks/power_sgd_hook.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <limits>

#include "lockstep/base/error.h"

namespace lockstep::ddp::inline hooks {
namespace {

using base::UsageError;
using checkpoint::StateDict;
using checkpoint::value_of;

constexpr std::int64_t kLeastRatio = 2;             // how many times smaller an approximation must be
constexpr std::int64_t kParallelNumbers = 1 << 16;  // for one thread, at least

// Names in the state, after that of the parameter.
constexpr const char* kSteps = "/steps";
constexpr const char* kP = "/p";
constexpr const char* kQ = "/q";
constexpr const char* kError = "/error";
constexpr const char* kRank = "rank";
constexpr const char* kSize = "size";

/// A number from -1 to 1 that is equal on all machines (SplitMix64: Steele, Lea, Flood, 2014).
float equal_number(std::uint64_t index) {
  std::uint64_t bits = (index + 1) * 0x9e3779b97f4a7c15;
  bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9;
  bits = (bits ^ bits >> 27) * 0x94d049bb133111eb;
  return static_cast<float>(static_cast<std::int32_t>((bits ^ bits >> 31) >> 32)) * 0x1p-31F;
}

at::Tensor equal_numbers(std::int64_t rows, std::int64_t columns) {
  const at::Tensor numbers = at::empty({rows, columns}, at::kFloat);
  auto* const values = numbers.mutable_data_ptr<float>();
  for (std::int64_t i = 0; i < numbers.numel(); ++i) values[i] = equal_number(static_cast<std::uint64_t>(i));
  return numbers;
}

/// Returns the matrix, which has more rows than columns, with orthonormal columns (modified Gram-Schmidt, in float64,
/// with sums in the order of rows). A column that depends on those before it, or is zero, as after a gradient of zeros,
/// is replaced by one of equal_number(): otherwise it would be zero for ever.
at::Tensor orthonormal(const at::Tensor& matrix) {
  const at::Tensor result = matrix.to(at::kCPU, at::kDouble).contiguous().clone();
  const std::int64_t rows = result.size(0), columns = result.size(1);
  auto* const values = result.mutable_data_ptr<double>();
  const auto dot = [&](std::int64_t a, std::int64_t b) {
    double sum = 0;
    for (std::int64_t i = 0; i < rows; ++i) sum += values[i * columns + a] * values[i * columns + b];
    return sum;
  };
  for (std::int64_t column = 0; column < columns; ++column)
    for (std::uint64_t replaced = 0;; ++replaced) {
      const double before = std::sqrt(dot(column, column));
      for (std::int64_t other = 0; other < column; ++other) {
        const double along = dot(other, column);
        for (std::int64_t i = 0; i < rows; ++i) values[i * columns + column] -= along * values[i * columns + other];
      }
      const double length = std::sqrt(dot(column, column));
      // What is left of a column that depends on the others is rounding.
      const bool is_there = length > 1e-6 * before && length > 1e-30;
      for (std::int64_t i = 0; i < rows; ++i)
        if (is_there)
          values[i * columns + column] /= length;
        else
          values[i * columns + column] =
              equal_number(static_cast<std::uint64_t>(i * columns + column) + (replaced << 40));
      if (is_there) break;
    }
  return result.to(at::kFloat);
}

/// Writes p q^T to `result`, which is contiguous. On the CPU by sums in the order of the rank, because the libraries
/// for matrices round differently on other CPUs.
void multiply(const at::Tensor& p, const at::Tensor& q, const at::Tensor& result) {
  if (!result.is_cpu()) {
    at::Tensor out = result;
    at::mm_out(out, p.to(result.device()), q.to(result.device()).t());
    return;
  }
  const at::Tensor columns_of_q = q.t().contiguous();
  const std::int64_t rows = p.size(0), columns = q.size(0), rank = p.size(1);
  const float* const left = p.const_data_ptr<float>();
  const float* const right = columns_of_q.const_data_ptr<float>();
  auto* const values = result.mutable_data_ptr<float>();
  at::parallel_for(0, rows, std::max<std::int64_t>(1, kParallelNumbers / columns),
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t i = begin; i < end; ++i) {
                       float* const row = values + i * columns;
                       for (std::int64_t j = 0; j < columns; ++j) row[j] = left[i * rank] * right[j];
                       for (std::int64_t k = 1; k < rank; ++k) {
                         const float factor = left[i * rank + k];
                         const float* const from = right + k * columns;
                         for (std::int64_t j = 0; j < columns; ++j) row[j] += factor * from[j];
                       }
                     }
                   });
}

}  // namespace

PowerSgdHook::PowerSgdHook(PowerSgdOptions options) : options_(options) {
  if (options.rank < 1 || options.rank > 8)
    throw UsageError("PowerSgdOptions.rank is " + std::to_string(options.rank) + "; expected 1 to 8");
  if (options.dense_steps < 0)
    throw UsageError("PowerSgdOptions.dense_steps is " + std::to_string(options.dense_steps) + "; expected 0 or more");
}

std::string PowerSgdHook::name() const {
  return "power_sgd rank=" + std::to_string(options_.rank) + " dense_steps=" + std::to_string(options_.dense_steps);
}

void PowerSgdHook::buckets_changed(const std::vector<comm::Bucket>& buckets) {
  buckets_.assign(buckets.size(), {});
  for (const comm::Bucket& bucket : buckets)
    for (std::size_t k = 0; k < bucket.names.size(); ++k) {
      const auto& shape = bucket.shapes[k];
      if (shape.size() < 2) continue;
      const std::int64_t rows = shape[0], columns = rows > 0 ? bucket.gradient(k).numel() / rows : 0;
      if ((rows + columns) * options_.rank * kLeastRatio >= rows * columns) continue;
      Matrix& matrix = matrices_[bucket.names[k]];
      if (matrix.rows == rows && matrix.columns == columns) continue;
      if (matrix.is_loaded)
        throw UsageError("PowerSgdHook: the saved state of " + bucket.names[k] + " has another shape; expected " +
                         std::to_string(rows) + " by " + std::to_string(columns));
      matrix = {.rows = rows, .columns = columns};
      matrix.p = equal_numbers(rows, options_.rank);
      matrix.q = equal_numbers(columns, options_.rank);
    }
}

/// Decides what of the bucket is sent where.
void PowerSgdHook::adopt_loaded(const comm::HookContext& context) {
  for (auto& [name, matrix] : matrices_) {
    if (!is_loaded_ || !matrix.error.defined()) continue;
    if (rank_ != context.rank())
      matrix.error = at::Tensor();     // another rank carries it over
    else if (size_ != context.size())  // gradients are divided by the number of ranks
      matrix.error.mul_(static_cast<double>(size_) / context.size());
  }
  is_loaded_ = false;
  rank_ = context.rank();
  size_ = context.size();
}

void PowerSgdHook::plan(const comm::Bucket& bucket, BucketState& state) {
  state = {};
  std::int64_t offset = 0;
  for (std::size_t k = 0; k < bucket.names.size(); ++k) {
    const auto found = matrices_.find(bucket.names[k]);
    Part part{.offset = offset, .count = bucket.gradient(k).numel()};
    if (found != matrices_.end() && !is_dense(found->second)) {
      part.matrix = &found->second;
      part.count = (sends_q(*part.matrix) ? part.matrix->columns : part.matrix->rows) * options_.rank;
    }
    offset += part.count;
    state.parts.push_back(part);
  }
  state.sent = at::empty({offset}, bucket.buffer.options().dtype(at::kFloat));
  state.values.resize(state.parts.size());
  state.own.resize(state.parts.size());
  state.basis.resize(state.parts.size());
}

comm::PendingPtr PowerSgdHook::start(comm::Bucket& bucket, comm::HookContext& context) {
  const at::NoGradGuard no_grad;
  BucketState& state = buckets_[bucket.index];
  if (is_loaded_ || rank_ < 0) adopt_loaded(context);
  plan(bucket, state);
  for (std::size_t k = 0; k < state.parts.size(); ++k) {
    const Part& part = state.parts[k];
    const at::Tensor place = state.sent.narrow(0, part.offset, part.count);
    if (!part.matrix) {
      place.copy_(bucket.gradient(k).reshape({-1}));
      continue;
    }
    Matrix& matrix = *part.matrix;
    state.values[k] = bucket.gradient(k).reshape({matrix.rows, matrix.columns}).to(at::kFloat, false, true);
    if (matrix.error.defined()) state.values[k].add_(matrix.error.to(state.values[k].device()));
    const bool is_q = sends_q(matrix);
    state.basis[k] = orthonormal(is_q ? matrix.p : matrix.q);
    const at::Tensor basis = state.basis[k].to(state.sent.device());
    state.own[k] = at::mm(is_q ? state.values[k].t() : state.values[k], basis);
    place.copy_(state.own[k].reshape({-1}));
  }
  return context.all_reduce(state.sent);
}

void PowerSgdHook::finish(comm::Bucket& bucket, comm::HookContext& /*context*/) {
  const at::NoGradGuard no_grad;
  BucketState& state = buckets_[bucket.index];
  const bool is_finite = state.sent.isfinite().all().item<bool>();  // on all ranks alike
  for (std::size_t k = 0; k < state.parts.size(); ++k) {
    const Part& part = state.parts[k];
    const at::Tensor gradient = bucket.gradient(k);
    const at::Tensor sum = state.sent.narrow(0, part.offset, part.count);
    if (!is_finite)
      gradient.fill_(std::numeric_limits<double>::quiet_NaN());
    else if (part.matrix)
      finish_matrix(*part.matrix, gradient, sum, k, state);
    else
      gradient.copy_(sum.view(gradient.sizes()));
  }
  state = {};
  is_finite_ &= is_finite;
  reduced_.insert(reduced_.end(), bucket.names.begin(), bucket.names.end());
  if (++num_finished_ == buckets_.size()) end_reduction();
}

/// All buckets of a reduction are finished: if all were finite, their state is the new one.
void PowerSgdHook::end_reduction() {
  for (const std::string& name : reduced_) {
    const auto found = matrices_.find(name);
    if (found == matrices_.end()) continue;
    Matrix& matrix = found->second;
    if (is_finite_) {
      if (matrix.next_p.defined()) matrix.p = matrix.next_p, matrix.q = matrix.next_q, matrix.error = matrix.next_error;
      ++matrix.steps;
    }
    matrix.next_p = matrix.next_q = matrix.next_error = at::Tensor();
  }
  reduced_.clear();
  num_finished_ = 0;
  is_finite_ = true;
}

void PowerSgdHook::finish_matrix(Matrix& matrix, const at::Tensor& gradient, const at::Tensor& sum, std::size_t index,
                                 BucketState& state) {
  const bool is_q = sends_q(matrix);
  const at::Tensor factor = sum.view({-1, options_.rank}).to(at::kCPU);
  const at::Tensor& basis = state.basis[index];
  const at::Tensor own = state.own[index].to(at::kCPU);
  const at::Tensor product = at::empty_like(state.values[index], at::MemoryFormat::Contiguous);
  is_q ? multiply(basis, own, product) : multiply(own, basis, product);
  matrix.next_error = state.values[index].sub_(product);
  is_q ? multiply(basis, factor, product) : multiply(factor, basis, product);
  gradient.copy_(product.view(gradient.sizes()));
  // The factor that was not sent is the orthonormal one from now on.
  (is_q ? matrix.next_q : matrix.next_p) = factor.clone();
  (is_q ? matrix.next_p : matrix.next_q) = basis;
}

StateDict PowerSgdHook::state_dict() const {
  StateDict state = {{kRank, rank_}, {kSize, size_}};
  for (const auto& [name, matrix] : matrices_) {
    state[name + kSteps] = matrix.steps;
    state[name + kP] = matrix.p;
    state[name + kQ] = matrix.q;
    state[name + kError] = matrix.error.defined() ? matrix.error : at::zeros({matrix.rows, matrix.columns});
  }
  return state;
}

void PowerSgdHook::load_state_dict(const StateDict& state) {
  std::map<std::string, Matrix> loaded;
  const std::int64_t rank = value_of<std::int64_t>(state, kRank), size = value_of<std::int64_t>(state, kSize);
  for (const auto& [key, value] : state) {
    if (!key.ends_with(kSteps)) continue;
    const std::string name = key.substr(0, key.size() - std::string_view(kSteps).size());
    Matrix matrix{.steps = value_of<std::int64_t>(state, key), .is_loaded = true};
    matrix.p = value_of<at::Tensor>(state, name + kP).to(at::kFloat).clone();
    matrix.q = value_of<at::Tensor>(state, name + kQ).to(at::kFloat).clone();
    matrix.error = value_of<at::Tensor>(state, name + kError).to(at::kFloat).clone();
    if (matrix.p.dim() != 2 || matrix.q.dim() != 2 || matrix.p.size(1) != options_.rank ||
        matrix.q.size(1) != options_.rank)
      throw UsageError("PowerSgdHook: the saved state of " + name + " has another rank; expected " +
                       std::to_string(options_.rank));
    matrix.rows = matrix.p.size(0), matrix.columns = matrix.q.size(0);
    const auto known = matrices_.find(name);
    const bool is_expected = matrices_.empty() || (known != matrices_.end() && known->second.rows == matrix.rows &&
                                                   known->second.columns == matrix.columns);
    if (!is_expected || matrix.error.sizes() != at::IntArrayRef({matrix.rows, matrix.columns}))
      throw UsageError("PowerSgdHook: the saved state of " + name + " is not that of a gradient of this model");
    loaded.emplace(name, std::move(matrix));
  }
  if (state.size() != 4 * loaded.size() + 2 || (!matrices_.empty() && loaded.size() != matrices_.size()))
    throw UsageError("PowerSgdHook: the saved state has other values than those of " + std::to_string(loaded.size()) +
                     " gradients; expected the state of this model");
  matrices_ = std::move(loaded);
  rank_ = rank, size_ = size;
  is_loaded_ = true;
}

}  // namespace lockstep::ddp::inline hooks
