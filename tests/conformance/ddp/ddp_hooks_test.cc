// Tests gradient hooks: the interface that they implement, and those of ddp/hooks.
#include <gmock/gmock.h>

#include <algorithm>
#include <limits>
#include <map>

#include "lockstep/ddp/hooks/bf16_compress_hook.h"
#include "lockstep/ddp/hooks/int8_hook.h"
#include "lockstep/ddp/hooks/power_sgd_hook.h"
#include "tests/conformance/ddp/test_models.h"
#include "tests/support/temp_dir.h"

namespace lockstep::tests::ddp_hooks_test {
namespace {

using ddp::Bf16CompressHook;
using ddp::DdpOptions;
using ddp::DistributedDataParallel;
using ddp::Int8Hook;
using ddp::PowerSgdHook;

/// Parameters of several dtypes, one of them transposed in memory.
struct MixedNetImpl : torch::nn::Module {
  MixedNetImpl() {
    wide = register_parameter("wide", torch::randn({7, 5}));
    transposed = register_parameter("transposed", torch::randn({3, 7}).t());
    exact = register_parameter("exact", torch::randn({6}, at::kDouble));
    narrow = register_parameter("narrow", torch::randn({9}).to(at::kBFloat16));
  }
  at::Tensor forward(const at::Tensor& x) {  // [n, 7] of float32
    return (torch::tanh(x.mm(wide)).pow(2).sum() + x.mm(transposed).sin().sum()).to(at::kDouble) +
           (exact * x.to(at::kDouble).sum()).cos().sum() + (narrow * x.to(at::kBFloat16).sum()).sum().to(at::kDouble);
  }
  at::Tensor wide, transposed, exact, narrow;
};
TORCH_MODULE(MixedNet);

/// Runs backward() on the batch of `rank` in `step`. Rank 1 has an empty batch if `rank_1_is_empty`.
void backward(MixedNet& net, int rank, int step, bool rank_1_is_empty = false) {
  if (rank == 1 && rank_1_is_empty) return (net->wide.sum() * 0).backward();
  net->forward(batch_of(rank, step, {4, 7})).backward();
}

/// Returns each rank's gradients in `step`, computed without other ranks.
std::vector<std::vector<at::Tensor>> local_gradients(MixedNet& net, const std::vector<int>& steps,
                                                     bool rank_1_is_empty = false) {
  std::vector<std::vector<at::Tensor>> all;
  for (int rank = 0; rank < world().size(); ++rank) {
    MixedNet alone;
    copy_values(*net, *alone);
    for (const int step : steps) backward(alone, rank, step, rank_1_is_empty);
    all.push_back(gradients(*alone));
  }
  return all;
}

/// Expects that the gradients of `net` are the means of `locals` within the bound of Bf16CompressHook, and have the
/// same bits on all ranks.
void expect_bf16_means(MixedNet& net, const std::vector<std::vector<at::Tensor>>& locals) {
  const auto named = net->named_parameters();
  const double n = world().size();
  for (std::size_t i = 0; i < named.size(); ++i) {
    const at::Tensor got = named[i].value().grad();
    at::Tensor mean = torch::zeros(got.sizes(), at::kDouble), mean_size = torch::zeros(got.sizes(), at::kDouble);
    for (const auto& local : locals) {
      if (!local[i].defined()) continue;
      mean += local[i].to(at::kDouble) / n;
      mean_size += local[i].to(at::kDouble).abs() / n;
    }
    const at::Tensor error = (got.to(at::kDouble) - mean).abs();
    EXPECT_TRUE(error.le(mean_size * n / 256 + 1e-30).all().item<bool>()) << named[i].key() << ": got\n"
                                                                          << got << "\nexpected\n"
                                                                          << mean;
    EXPECT_EQ(got.scalar_type(), named[i].value().scalar_type());
    EXPECT_TRUE(same_bits(got)) << named[i].key();
    if (world().size() > 1) {
      EXPECT_TRUE(torch::equal(got, got.to(at::kBFloat16).to(got.scalar_type())))
          << named[i].key() << " was not sent as bfloat16";
    }
  }
}

TEST(DdpHooks, Bf16MeansAreCloseAndEqualOnAllRanks) {
  MixedNet net;
  DistributedDataParallel ddp(net, world(), {.hook = std::make_shared<Bf16CompressHook>()});
  for (int step = 0; step < 4; ++step) {
    net->zero_grad();
    backward(net, world().rank(), step);
    expect_bf16_means(net, local_gradients(net, {step}));
  }
}

TEST(DdpHooks, Bf16WithARankWithoutGradients) {
  MixedNet net;
  DistributedDataParallel ddp(net, world(), {.hook = std::make_shared<Bf16CompressHook>()});
  for (int step = 0; step < 4; ++step) {
    net->zero_grad();
    backward(net, world().rank(), step, /*rank_1_is_empty=*/true);
    expect_bf16_means(net, local_gradients(net, {step}, /*rank_1_is_empty=*/true));
  }
}

TEST(DdpHooks, Bf16AfterNoSync) {
  MixedNet net;
  DistributedDataParallel ddp(net, world(), {.hook = std::make_shared<Bf16CompressHook>()});
  for (int step = 0; step < 6; step += 2) {
    net->zero_grad();
    {
      const auto guard = ddp.no_sync();
      backward(net, world().rank(), step);
    }
    backward(net, world().rank(), step + 1);
    expect_bf16_means(net, local_gradients(net, {step, step + 1}));
  }
}

/// Implements an all-reduce by gathering and adding, so that it has two operations, the second of them in finish().
class GatherHook final : public comm::GradientHook {
 public:
  std::string name() const override { return "gather"; }
  comm::PendingPtr start(comm::Bucket& bucket, comm::HookContext& context) override {
    all_ = at::empty({context.size() * bucket.buffer.numel()}, bucket.buffer.options());
    return context.all_gather(all_, bucket.buffer.clone());
  }
  void finish(comm::Bucket& bucket, comm::HookContext& context) override {
    bucket.buffer.copy_(all_.view({context.size(), -1}).sum(0));
    at::Tensor ones = torch::ones({1});
    const auto pending = context.all_reduce(ones);
    context.wait(*pending);
    EXPECT_EQ(ones.item<float>(), static_cast<float>(context.size()));
  }

 private:
  at::Tensor all_;
};

TEST(DdpHooks, SumHookEqualsNoHook) {
  Mlp with, without;
  testing::internal::CaptureStderr();
  DistributedDataParallel a(with, world(), {.hook = std::make_shared<GatherHook>()});
  const std::string output = testing::internal::GetCapturedStderr();
  const bool reports = world().size() > 1 && world().rank() == 0;
  EXPECT_EQ(output.find("gradients of first.weight.. are packed into buckets for the hook " + GatherHook().name()) !=
                std::string::npos,
            reports)
      << output;
  DistributedDataParallel b(without, world());
  copy_values(*without, *with);
  for (int step = 0; step < 4; ++step) {
    with->zero_grad();
    without->zero_grad();
    const at::Tensor x = batch_of(world().rank(), step, {4, 7});
    with->forward(x).pow(2).sum().backward();
    without->forward(x).pow(2).sum().backward();
    const auto p = gradients(*with);
    const auto q = gradients(*without);
    for (std::size_t i = 0; i < p.size(); ++i) {
      EXPECT_TRUE(torch::allclose(p[i], q[i], 1e-5, 1e-6));
      EXPECT_TRUE(same_bits(p[i]));
    }
  }
}

/// Sums buckets and records what the reducer passes.
class RecordingHook final : public comm::GradientHook {
 public:
  std::string name() const override { return "recording"; }
  void buckets_changed(const std::vector<comm::Bucket>& changed) override {
    buckets = changed;
    ++num_changes;
  }
  comm::PendingPtr start(comm::Bucket& bucket, comm::HookContext& context) override {
    EXPECT_GT(num_changes, 0) << "start() before buckets_changed()";
    EXPECT_TRUE(bucket.buffer.is_same(buckets[bucket.index].buffer));
    EXPECT_EQ(bucket.names, buckets[bucket.index].names);
    for (std::size_t k = 0; k < bucket.names.size(); ++k) started[bucket.names[k]] = bucket.gradient(k).clone();
    return context.all_reduce(bucket.buffer);
  }
  void finish(comm::Bucket&, comm::HookContext&) override {}

  std::vector<comm::Bucket> buckets;
  int num_changes = 0;
  std::map<std::string, at::Tensor> started;  // this rank's gradients, by name
};

TEST(DdpHooks, BucketsDescribeTheirGradients) {
  if (world().size() == 1) return;  // a world of one has no buckets
  MixedNet net;
  const auto hook = std::make_shared<RecordingHook>();
  DistributedDataParallel ddp(net, world(), {.hook = hook});
  EXPECT_EQ(hook->num_changes, 0) << "the first backward() determines the layout";
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    backward(net, world().rank(), step);
    EXPECT_EQ(hook->num_changes, 1);
    const auto local = local_gradients(net, {step})[static_cast<std::size_t>(world().rank())];
    const auto named = net->named_parameters();
    ASSERT_EQ(hook->started.size(), named.size());
    for (std::size_t i = 0; i < named.size(); ++i) {
      const at::Tensor& seen = hook->started.at(named[i].key());
      EXPECT_TRUE(torch::allclose(seen, local[i] / world().size(), 1e-2, 1e-5)) << named[i].key();
    }
  }
  for (const comm::Bucket& bucket : hook->buckets) {
    std::int64_t end = 0;
    for (std::size_t k = 0; k < bucket.names.size(); ++k) {
      const at::Tensor parameter = net->named_parameters()[bucket.names[k]];
      EXPECT_EQ(bucket.shapes[k], parameter.sizes().vec());
      EXPECT_EQ(bucket.strides[k], parameter.strides().vec());
      EXPECT_EQ(bucket.offsets[k] % 64, 0);
      EXPECT_GE(bucket.offsets[k], end);
      end = bucket.offsets[k] + parameter.numel();
      EXPECT_EQ(bucket.gradient(k).scalar_type(), parameter.scalar_type());
      EXPECT_EQ(bucket.gradient(k).const_data_ptr(), parameter.grad().const_data_ptr()) << "no copy is delivered";
    }
    EXPECT_LE(end, bucket.buffer.numel());
  }
}

TEST(DdpHooks, BucketsChangeWhenAHeadIsNotUsedAnyMore) {
  if (world().size() == 1) return;  // a world of one has no buckets
  MultiHead net;
  const auto hook = std::make_shared<RecordingHook>();
  DistributedDataParallel ddp(net, world(), {.hook = hook});
  const auto num_gradients = [&] {
    std::size_t count = 0;
    for (const comm::Bucket& bucket : hook->buckets) count += bucket.names.size();
    return count;
  };
  const auto step = [&](int number, int head) {
    net->zero_grad();
    net->forward(batch_of(world().rank(), number, {4, 6}), head).pow(2).sum().backward();
  };
  step(0, 0);
  EXPECT_EQ(hook->num_changes, 1);
  EXPECT_EQ(num_gradients(), 4U);
  for (int number = 1; number < 6; ++number) step(number, -1);
  EXPECT_EQ(hook->num_changes, 2) << "head 0 has lost its place";
  EXPECT_EQ(num_gradients(), 2U);
  step(6, 1);  // has no place yet
  step(7, 1);
  EXPECT_EQ(hook->num_changes, 3);
  EXPECT_EQ(num_gradients(), 4U);
  EXPECT_TRUE(same_bits(at::tensor({hook->num_changes})));
}

TEST(DdpHooks, RestoredLayoutIsPassedAtConstruction) {
  if (world().size() == 1) return;  // a world of one has no buckets
  MixedNet net;
  std::string layout;
  {
    DistributedDataParallel ddp(net, world(), {.hook = std::make_shared<RecordingHook>()});
    backward(net, world().rank(), 0);
    layout = ddp.stats().layout;
  }
  net->zero_grad();
  const auto hook = std::make_shared<RecordingHook>();
  DistributedDataParallel ddp(net, world(), {.bucket_layout = layout, .hook = hook});
  EXPECT_EQ(hook->num_changes, 1);
  backward(net, world().rank(), 1);
  EXPECT_EQ(hook->num_changes, 1);
}

/// A rank-r approximation with error feedback, in the way of PowerSGD (Vogels et al., NeurIPS 2019): matrices M are
/// sent as P = M Q and Q' = M^T P. Vectors are sent as they are. What the approximation leaves out is added to the next
/// gradient.
class LowRankHook final : public comm::GradientHook {
 public:
  explicit LowRankHook(std::int64_t rank) : rank_(rank) {}
  std::string name() const override { return "low_rank " + std::to_string(rank_); }

  void buckets_changed(const std::vector<comm::Bucket>& buckets) override {
    std::map<std::string, Matrix> old;
    for (auto& matrices : matrices_)
      for (auto& matrix : matrices) old.emplace(matrix.name, std::move(matrix));
    matrices_.assign(buckets.size(), {});
    vectors_.assign(buckets.size(), {});
    for (const comm::Bucket& bucket : buckets)
      for (std::size_t k = 0; k < bucket.names.size(); ++k) {
        if (bucket.shapes[k].size() != 2) {
          vectors_[bucket.index].push_back(bucket.gradient(k));
          continue;
        }
        const auto found = old.find(bucket.names[k]);
        matrices_[bucket.index].push_back(found == old.end() ? make_matrix(bucket, k) : std::move(found->second));
        matrices_[bucket.index].back().gradient = bucket.gradient(k);
      }
  }

  comm::PendingPtr start(comm::Bucket& bucket, comm::HookContext& context) override {
    std::vector<at::Tensor> sent;
    for (Matrix& matrix : matrices_[bucket.index]) {
      matrix.gradient.add_(matrix.error);
      sent.push_back(matrix.gradient.mm(matrix.q).flatten());
    }
    for (const at::Tensor& vector : vectors_[bucket.index]) sent.push_back(vector.flatten());
    sent_[bucket.index] = at::cat(sent);
    return context.all_reduce(sent_[bucket.index]);
  }

  void finish(comm::Bucket& bucket, comm::HookContext& context) override {
    std::int64_t position = 0;
    const auto take = [&, all = sent_[bucket.index]](at::IntArrayRef shape) {
      const std::int64_t count = c10::multiply_integers(shape);
      return all.narrow(0, std::exchange(position, position + count), count).view(shape);
    };
    for (Matrix& matrix : matrices_[bucket.index]) {
      const at::Tensor p = std::get<0>(at::linalg_qr(take({matrix.gradient.size(0), matrix.q.size(1)})));
      at::Tensor q = matrix.gradient.t().mm(p);
      const at::Tensor mine = q.clone();
      const auto pending = context.all_reduce(q);
      context.wait(*pending);
      matrix.error.copy_(matrix.gradient - p.mm(mine.t()));
      matrix.gradient.copy_(p.mm(q.t()));
      matrix.q = q;
    }
    for (const at::Tensor& vector : vectors_[bucket.index]) vector.copy_(take(vector.sizes()));
  }

  /// This rank's error of a parameter: what its contributions (gradients divided by the ranks) lack.
  at::Tensor error_of(const std::string& parameter) const {
    for (const auto& matrices : matrices_)
      for (const Matrix& matrix : matrices)
        if (matrix.name == parameter) return matrix.error;
    return {};
  }

 private:
  struct Matrix {
    std::string name;
    at::Tensor gradient;  // a view of the bucket
    at::Tensor error;
    at::Tensor q;
  };

  Matrix make_matrix(const comm::Bucket& bucket, std::size_t k) const {
    const std::int64_t rows = bucket.shapes[k][0], columns = bucket.shapes[k][1];
    auto generator = at::make_generator<at::CPUGeneratorImpl>(std::uint64_t{1});
    const at::Tensor q = at::randn({columns, std::min({rank_, rows, columns})}, generator, at::kDouble);
    return {.name = bucket.names[k],
            .gradient = {},
            .error = at::zeros({rows, columns}, bucket.buffer.options()),
            .q = q.to(bucket.buffer.scalar_type())};
  }

  const std::int64_t rank_;
  std::vector<std::vector<Matrix>> matrices_;     // by bucket
  std::vector<std::vector<at::Tensor>> vectors_;  // by bucket
  std::map<std::size_t, at::Tensor> sent_;        // by bucket
};

/// Returns the mean of the ranks' gradients of an Mlp in `step`.
std::vector<at::Tensor> mlp_means(Mlp& net, int step) {
  return mean_over_ranks([&](int rank) {
    Mlp alone;
    copy_values(*net, *alone);
    alone->forward(batch_of(rank, step, {4, 7})).pow(2).sum().backward();
    return gradients(*alone);
  });
}

TEST(DdpHooks, LowRankHookOfFullRankIsExact) {
  Mlp net;
  DistributedDataParallel ddp(net, world(), {.hook = std::make_shared<LowRankHook>(100)});
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    net->forward(batch_of(world().rank(), step, {4, 7})).pow(2).sum().backward();
    const auto expected = mlp_means(net, step);
    const auto got = gradients(*net);
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(torch::allclose(got[i], expected[i], 1e-3, 1e-4)) << i;
      EXPECT_TRUE(same_bits(got[i]));
    }
  }
}

TEST(DdpHooks, ErrorFeedbackKeepsWhatAnApproximationLeavesOut) {
  if (world().size() == 1) return;  // a world of one has no buckets
  Mlp net;
  const auto hook = std::make_shared<LowRankHook>(1);
  DistributedDataParallel ddp(net, world(), {.bucket_bytes = {1}, .hook = hook});
  at::Tensor sent = torch::zeros_like(net->first->weight), exact = torch::zeros_like(sent);
  for (int step = 0; step < 5; ++step) {
    net->zero_grad();
    net->forward(batch_of(world().rank(), step, {4, 7})).pow(2).sum().backward();
    const at::NoGradGuard no_grad;
    sent += net->first->weight.grad();
    const at::AutoGradMode with_gradients(true);
    exact += mlp_means(net, step)[0];
    EXPECT_TRUE(same_bits(net->first->weight.grad()));
  }
  at::Tensor missing = hook->error_of("first.weight").clone();
  world().all_reduce(missing);
  EXPECT_GT(missing.abs().max().item<float>(), 1e-3) << "rank 1 cannot represent the gradients";
  EXPECT_TRUE(torch::allclose(sent + missing, exact, 1e-3, 1e-3));
}

/// Matrices that are large enough to be approximated, one of them transposed in memory, and a vector.
struct MatrixNetImpl : torch::nn::Module {
  MatrixNetImpl() {
    torch::manual_seed(3);
    first = register_parameter("first", torch::randn({40, 60}) * 0.1);
    second = register_parameter("second", torch::randn({2, 5, 60}).permute({1, 2, 0}) * 0.1);  // [5, 60, 2]
    bias = register_parameter("bias", torch::randn({60}));
  }
  at::Tensor loss(int rank, int step) {
    const at::Tensor x = batch_of(rank, step, {6, 40}).mm(first) + bias;
    return (torch::tanh(x).matmul(second.select(0, rank % 5)).sin() * x.narrow(1, 0, 2)).sum();
  }
  at::Tensor first, second, bias;
};
TORCH_MODULE(MatrixNet);

at::Tensor tensor_of(const checkpoint::StateDict& state, const std::string& name) {
  return checkpoint::value_of<at::Tensor>(state, name).to(at::kDouble);
}

/// PowerSGD of one gradient in float64, with the factors that a hook begins with.
struct PowerSgdReference {
  PowerSgdReference(const checkpoint::StateDict& state, const std::string& name)
      : p(tensor_of(state, name + "/p")), q(tensor_of(state, name + "/q")) {}
  /// Returns the mean of the ranks' gradients, [rows, columns] each.
  at::Tensor mean(const std::vector<at::Tensor>& gradients) {
    const bool is_q = step++ % 2 == 0;
    const at::Tensor basis = std::get<0>(at::linalg_qr(is_q ? p : q));
    errors.resize(gradients.size());
    at::Tensor factor = at::zeros_like(is_q ? q : p);
    const auto product = [&](const at::Tensor& other) { return is_q ? basis.mm(other.t()) : other.mm(basis.t()); };
    for (std::size_t r = 0; r < gradients.size(); ++r) {
      at::Tensor value = gradients[r].to(at::kDouble) / static_cast<double>(gradients.size());
      if (errors[r].defined()) value += errors[r];
      const at::Tensor own = (is_q ? value.t() : value).mm(basis);
      errors[r] = value - product(own);
      factor += own;
    }
    (is_q ? q : p) = factor;
    (is_q ? p : q) = basis;
    return product(factor);
  }
  at::Tensor p, q;
  int step = 0;
  std::vector<at::Tensor> errors;
};

TEST(PowerSgd, IsItsFormulaWithErrorFeedback) {
  if (world().size() == 1) GTEST_SKIP() << "one rank has no buckets";
  MatrixNet net;
  const auto hook = std::make_shared<PowerSgdHook>(ddp::PowerSgdOptions{.rank = 2, .dense_steps = 2});
  DistributedDataParallel ddp(net, world(), {.hook = hook});
  std::map<std::string, PowerSgdReference> references;
  for (int step = 0; step < 7; ++step) {
    net->zero_grad();
    net->loss(world().rank(), step).backward();
    std::vector<std::vector<at::Tensor>> locals;
    for (int rank = 0; rank < world().size(); ++rank) {
      MatrixNet alone;
      alone->loss(rank, step).backward();
      locals.push_back(gradients(*alone));
    }
    const auto named = net->named_parameters();
    for (std::size_t i = 0; i < named.size(); ++i) {
      const at::Tensor got = named[i].value().grad();
      std::vector<at::Tensor> mine;
      for (const auto& local : locals) mine.push_back(local[i].reshape({got.size(0), -1}));
      at::Tensor expected = at::stack(mine).to(at::kDouble).mean(0);
      const double size = expected.abs().max().item<double>();
      if (step >= 2 && named[i].key() != "bias") expected = references.at(named[i].key()).mean(mine);
      EXPECT_LT((got.reshape({got.size(0), -1}).to(at::kDouble) - expected).abs().max().item<double>(), 1e-5 * size)
          << named[i].key() << " step " << step;
      EXPECT_TRUE(same_bits(got)) << named[i].key();
    }
    if (step == 1) {
      const checkpoint::StateDict state = hook->state_dict();
      for (const char* name : {"first", "second"}) {
        references.emplace(name, PowerSgdReference(state, name));
        references.at(name).step =
            static_cast<int>(checkpoint::value_of<std::int64_t>(state, name + std::string("/steps")));
      }
    }
  }
}

TEST(PowerSgd, InfinityReachesAllRanksAndChangesNothingElse) {
  if (world().size() == 1) GTEST_SKIP() << "one rank has no buckets";
  std::vector<std::vector<at::Tensor>> results;
  for (const bool with_infinity : {false, true}) {
    MatrixNet net;
    const auto hook = std::make_shared<PowerSgdHook>(ddp::PowerSgdOptions{.rank = 2, .dense_steps = 0});
    DistributedDataParallel ddp(net, world(), {.bucket_bytes = {1000}, .hook = hook});  // several buckets
    for (int step = 0; step < 5; ++step) {
      if (with_infinity && step == 3) {
        net->zero_grad();
        const double factor = world().rank() == 1 ? std::numeric_limits<double>::infinity() : 1.0;
        (net->loss(world().rank(), 9) * factor).backward();
        EXPECT_TRUE(net->first.grad().isnan().any().item<bool>());
      }
      net->zero_grad();
      net->loss(world().rank(), step).backward();
    }
    results.push_back(gradients(*net));
  }
  for (std::size_t i = 0; i < results[0].size(); ++i) EXPECT_TRUE(results[0][i].equal(results[1][i])) << i;
}

TEST(PowerSgd, StateResumesWithTheSameBits) {
  if (world().size() == 1) GTEST_SKIP() << "one rank has no buckets";
  std::vector<std::vector<at::Tensor>> results;
  for (const bool is_stopped : {false, true}) {
    MatrixNet net;
    auto hook = std::make_shared<PowerSgdHook>(ddp::PowerSgdOptions{.rank = 2, .dense_steps = 1});
    auto ddp = std::make_unique<DistributedDataParallel>(net, world(), DdpOptions{.hook = hook});
    for (int step = 0; step < 6; ++step) {
      if (is_stopped && step == 3) {
        const checkpoint::StateDict state = checkpoint::clone_state(hook->state_dict());
        const std::string layout = ddp->stats().layout;
        ddp.reset();
        hook = std::make_shared<PowerSgdHook>(ddp::PowerSgdOptions{.rank = 2, .dense_steps = 1});
        hook->load_state_dict(state);
        ddp =
            std::make_unique<DistributedDataParallel>(net, world(), DdpOptions{.bucket_layout = layout, .hook = hook});
      }
      net->zero_grad();
      net->loss(world().rank(), step).backward();
    }
    results.push_back(gradients(*net));
  }
  for (std::size_t i = 0; i < results[0].size(); ++i) EXPECT_TRUE(results[0][i].equal(results[1][i])) << i;
}

// A gradient of zeros, as behind a layer that is initialised with zeros, does not stop its parameter for ever.
TEST(PowerSgd, ApproximatesAgainAfterAGradientOfZeros) {
  if (world().size() == 1) GTEST_SKIP() << "one rank has no buckets";
  MatrixNet net;
  DistributedDataParallel ddp(
      net, world(), {.hook = std::make_shared<PowerSgdHook>(ddp::PowerSgdOptions{.rank = 2, .dense_steps = 0})});
  for (int step = 0; step < 6; ++step) {
    net->zero_grad();
    (net->loss(world().rank(), step) * (step < 2 ? 0.0 : 1.0)).backward();
    EXPECT_EQ(net->first.grad().abs().max().item<float>() > 0, step >= 2) << step;
  }
}

TEST(PowerSgd, WrongOptionsAndStatesAreRefused) {
  const auto message = [](auto action) { return message_of<base::UsageError>(action); };
  EXPECT_THAT(message([] { PowerSgdHook({.rank = 9}); }), testing::HasSubstr("rank is 9; expected 1 to 8"));
  EXPECT_THAT(message([] { PowerSgdHook({.dense_steps = -1}); }), testing::HasSubstr("dense_steps is -1; expected 0"));
  checkpoint::StateDict state = {{"rank", std::int64_t{0}},    {"size", std::int64_t{1}},
                                 {"w/steps", std::int64_t{3}}, {"w/p", at::zeros({4, 2})},
                                 {"w/q", at::zeros({5, 2})},   {"w/error", at::zeros({4, 5})}};
  EXPECT_THAT(message([&] { PowerSgdHook().load_state_dict(state); }), testing::HasSubstr("another rank; expected 4"));
}

constexpr float kStep = 0.01F;  // of the rounded mean of a FixedGradientNet: 1.27 / 127

/// A parameter whose gradient is the same in each step: numbers of less than a step, and a large one in each 64. The
/// mean over the ranks is target(); that of a rank differs from it.
struct FixedGradientNetImpl : torch::nn::Module {
  FixedGradientNetImpl() { weight = register_parameter("weight", torch::zeros({70, 90})); }
  static at::Tensor target() {
    const at::Tensor values = at::linspace(0.1 * kStep, 0.9 * kStep, 70 * 90);
    values.slice(0, 0, values.numel(), 64).fill_(127 * kStep);
    return values.view({70, 90});
  }
  at::Tensor loss(int rank) {
    const double weight_of_rank = 1 + 0.5 * (rank - 0.5 * (world().size() - 1)) / world().size();
    return (weight * target() * weight_of_rank).sum();
  }
  at::Tensor weight;
};
TORCH_MODULE(FixedGradientNet);

bool rounds() { return world().size() > 1 && world().transport() != "shm"; }

TEST(Int8, WhatRoundingLosesArrivesLater) {
  FixedGradientNet net;
  DistributedDataParallel ddp(net, world(), {.hook = std::make_shared<Int8Hook>()});
  at::Tensor sum = torch::zeros({70, 90});
  for (int step = 1; step <= 20; ++step) {
    net->zero_grad();
    net->loss(world().rank()).backward();
    const at::Tensor got = net->weight.grad();
    EXPECT_TRUE(same_bits(got));
    EXPECT_EQ((got - FixedGradientNet::Impl::target()).abs().max().item<float>() > 0.1F * kStep, rounds()) << step;
    sum += got;
    EXPECT_LT((sum - step * FixedGradientNet::Impl::target()).abs().max().item<float>(), 1.1F * kStep) << step;
  }
}

TEST(Int8, GradientsOfAllDtypesAndOfSomeRanksOnly) {
  MixedNet net;
  DistributedDataParallel ddp(net, world(), {.hook = std::make_shared<Int8Hook>()});
  for (int step = 0; step < 4; ++step) {
    const bool rank_1_is_empty = step % 2 == 1;
    net->zero_grad();
    backward(net, world().rank(), step, rank_1_is_empty);
    const auto locals = local_gradients(net, {step}, rank_1_is_empty);
    const auto named = net->named_parameters();
    for (std::size_t i = 0; i < named.size(); ++i) {
      const at::Tensor got = named[i].value().grad();
      at::Tensor mean = torch::zeros(got.sizes(), at::kDouble);
      for (const auto& local : locals)
        if (local[i].defined()) mean += local[i].to(at::kDouble) / world().size();
      double largest = 1e-6;  // numbers of several gradients share a scale
      for (const auto& local : locals)
        for (const at::Tensor& gradient : local)
          if (gradient.defined()) largest = std::max(largest, gradient.abs().max().to(at::kDouble).item<double>());
      EXPECT_LT((got.to(at::kDouble) - mean).abs().max().item<double>(), 3 * largest / 127) << named[i].key();
      EXPECT_TRUE(same_bits(got)) << named[i].key();
    }
  }
}

TEST(Int8, InfinityReachesAllRanksAndDropsWhatWasCarriedOver) {
  if (world().size() == 1) return;  // one rank has no buckets
  std::vector<std::vector<at::Tensor>> results;
  std::string layout;
  for (const bool with_infinity : {true, false}) {
    FixedGradientNet net;
    DistributedDataParallel ddp(net, world(), {.bucket_layout = layout, .hook = std::make_shared<Int8Hook>()});
    for (int step = with_infinity ? 0 : 4; step < 6; ++step) {
      net->zero_grad();
      const bool is_last = world().rank() == world().size() - 1;
      const double factor = step == 3 && is_last ? std::numeric_limits<double>::infinity() : 1.0;
      (net->loss(world().rank()) * factor).backward();
      EXPECT_EQ(net->weight.grad().isfinite().all().item<bool>(), step != 3) << step;
    }
    layout = ddp.stats().layout;
    results.push_back(gradients(*net));
  }
  EXPECT_TRUE(results[0][0].equal(results[1][0]));
}

TEST(Int8, StateResumesWithTheSameBits) {
  if (world().size() == 1) return;  // one rank has no buckets
  std::vector<at::Tensor> results;
  enum Stop { kNone, kStopped, kStopped_StateAfterLayout, kStopped_OfAnotherRank };
  for (const Stop stop : {kNone, kStopped, kStopped_StateAfterLayout, kStopped_OfAnotherRank}) {
    FixedGradientNet net;
    auto hook = std::make_shared<Int8Hook>();
    auto ddp = std::make_unique<DistributedDataParallel>(net, world(), DdpOptions{.hook = hook});
    for (int step = 0; step < 6; ++step) {
      if (stop != kNone && step == 3) {
        checkpoint::StateDict state = checkpoint::clone_state(hook->state_dict());
        if (stop == kStopped_OfAnotherRank) state["rank"] = std::int64_t{world().size()};
        const std::string layout = ddp->stats().layout;
        ddp.reset();
        hook = std::make_shared<Int8Hook>();
        if (stop != kStopped_StateAfterLayout) {
          hook->load_state_dict(state);
          const checkpoint::StateDict again = hook->state_dict();  // a second stop before the first step
          EXPECT_EQ(again.size(), state.size());
          hook->load_state_dict(again);
        }
        ddp =
            std::make_unique<DistributedDataParallel>(net, world(), DdpOptions{.bucket_layout = layout, .hook = hook});
        if (stop == kStopped_StateAfterLayout) hook->load_state_dict(state);
      }
      net->zero_grad();
      net->loss(world().rank()).backward();
    }
    results.push_back(net->weight.grad().clone());
    EXPECT_EQ(results.back().equal(results.front()), stop != kStopped_OfAnotherRank || !rounds()) << stop;
  }
}

TEST(Int8, WrongStateIsRefused) {
  const checkpoint::StateDict state = {{"rank", std::int64_t{0}}, {"size", std::int64_t{1}}, {"other", true}};
  EXPECT_THAT(message_of<base::UsageError>([&] { Int8Hook().load_state_dict(state); }),
              testing::HasSubstr("has 3 values; expected the state of an Int8Hook"));
}

}  // namespace
}  // namespace lockstep::tests::ddp_hooks_test
