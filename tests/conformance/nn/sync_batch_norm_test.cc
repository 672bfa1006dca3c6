// Tests SyncBatchNorm over all ranks against one BatchNorm on the whole batch.
#include "lockstep/nn/sync_batch_norm.h"

#include <gmock/gmock.h>

#include <filesystem>

#include "lockstep/checkpoint/module_io.h"
#include "lockstep/nn/data_parallel.h"
#include "tests/conformance/ddp/test_models.h"
#include "tests/support/temp_dir.h"

namespace lockstep::tests::sync_batch_norm_test {
namespace {

using nn::convert_sync_batch_norm;
using nn::SyncBatchNorm;
using torch::nn::BatchNormOptions;

/// Returns the batch size of a rank: different on each rank, and 0 on the last of several ranks.
std::int64_t samples_of(int rank) { return rank > 0 && rank == world().size() - 1 ? 0 : 3 + 2 * rank; }

std::int64_t samples_before(int rank) {
  std::int64_t sum = 0;
  for (int r = 0; r < rank; ++r) sum += samples_of(r);
  return sum;
}

/// Returns this rank's part of a batch of all ranks.
at::Tensor local_part(const at::Tensor& whole) {
  return whole.narrow(0, samples_before(world().rank()), samples_of(world().rank()));
}

std::vector<std::int64_t> whole_shape(std::vector<std::int64_t> shape) {
  shape.insert(shape.begin(), samples_before(world().size()));
  return shape;
}

double tolerance(at::ScalarType dtype) {
  return dtype == at::kDouble ? 1e-10 : dtype == at::kFloat ? 1e-5 : dtype == at::kHalf ? 4e-3 : 3e-2;
}

void expect_near(const at::Tensor& got, const at::Tensor& expected, at::ScalarType dtype, const std::string& what) {
  ASSERT_EQ(got.sizes(), expected.sizes()) << what;
  const double bound = tolerance(dtype);
  EXPECT_TRUE(torch::allclose(got.to(at::kDouble), expected.to(at::kDouble), bound, bound)) << what << "\ngot\n"
                                                                                            << got << "\nexpected\n"
                                                                                            << expected;
}

/// Returns the sum of `tensor` over all ranks.
at::Tensor sum_over_ranks(const at::Tensor& tensor) {
  at::Tensor sum = tensor.to(at::kDouble).contiguous().clone();
  world().all_reduce(sum);
  return sum;
}

at::Tensor random(at::IntArrayRef shape, int seed) { return batch_of(77, seed, shape, at::kDouble); }

template <typename Whole>
void set_random_parameters(torch::nn::Module& sync, Whole& whole) {
  const at::NoGradGuard no_grad;
  if (!whole->weight.defined()) return;
  whole->weight.copy_(random({whole->options.num_features()}, 900));
  whole->bias.copy_(random({whole->options.num_features()}, 901));
  copy_values(*whole, sync);
}

/// Expects that three steps of `sync` on this rank's part of each batch equal three steps of `whole`, in double, on the
/// whole batch.
template <typename Whole, typename Sync>
void expect_equal_training(Sync& sync, Whole& whole, std::vector<std::int64_t> shape, at::ScalarType dtype) {
  sync->to(world().device());
  whole->to(world().device(), at::kDouble);
  for (int step = 0; step < 3; ++step) {
    // The inputs are values of `dtype`, so that only the rounding of the norm itself differs.
    const at::Tensor values = (random(whole_shape(shape), step) * 2 + 0.5).to(dtype).to(at::kDouble);
    const at::Tensor output_gradient = random(whole_shape(shape), 50 + step).to(dtype).to(at::kDouble);
    at::Tensor x = local_part(values).to(dtype).clone().requires_grad_();
    at::Tensor all = values.clone().requires_grad_();
    sync->zero_grad();
    whole->zero_grad();
    const at::Tensor y = sync->forward(x);
    const at::Tensor z = whole->forward(all);
    EXPECT_EQ(y.scalar_type(), dtype);
    expect_near(y, local_part(z), dtype, "output");
    y.backward(local_part(output_gradient).to(dtype));
    z.backward(output_gradient);
    expect_near(x.grad(), local_part(all.grad()), dtype, "gradient of the input");
    if (whole->weight.defined()) {
      expect_near(sum_over_ranks(sync->weight.grad()), whole->weight.grad(), dtype, "gradient of the weight");
      expect_near(sum_over_ranks(sync->bias.grad()), whole->bias.grad(), dtype, "gradient of the bias");
    }
    if (whole->running_mean.defined()) {
      expect_near(sync->running_mean, whole->running_mean, dtype, "running mean");
      expect_near(sync->running_var, whole->running_var, dtype, "running variance");
      EXPECT_EQ(sync->num_batches_tracked.template item<std::int64_t>(), step + 1);
      EXPECT_TRUE(same_bits(sync->running_mean));
      EXPECT_TRUE(same_bits(sync->running_var));
    }
  }
}

TEST(SyncBatchNorm, EqualsOneBatchNormOnTheWholeBatch) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    SyncBatchNorm sync(world(), BatchNormOptions(5));
    sync->to(dtype);
    torch::nn::BatchNorm2d whole(5);
    set_random_parameters(*sync, whole);
    expect_equal_training(sync, whole, {5, 3, 4}, dtype);
  }
}

TEST(SyncBatchNorm, TakesInputsOfAnyDimensions) {
  SyncBatchNorm flat(world(), BatchNormOptions(6)), sequence(world(), BatchNormOptions(6)),
      volume(world(), BatchNormOptions(6));
  torch::nn::BatchNorm1d flat_whole(6), sequence_whole(6);
  torch::nn::BatchNorm3d volume_whole(6);
  expect_equal_training(flat, flat_whole, {6}, at::kFloat);
  expect_equal_training(sequence, sequence_whole, {6, 7}, at::kFloat);
  expect_equal_training(volume, volume_whole, {6, 2, 3, 2}, at::kFloat);
}

TEST(SyncBatchNorm, LowPrecisionUsesFloatStatistics) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    SyncBatchNorm sync(world(), BatchNormOptions(5));
    torch::nn::BatchNorm2d whole(5);
    expect_equal_training(sync, whole, {5, 3, 4}, dtype);
    SyncBatchNorm converted(world(), BatchNormOptions(5));  // with weights of that dtype
    converted->to(dtype);
    torch::nn::BatchNorm2d again(5);
    expect_equal_training(converted, again, {5, 3, 4}, dtype);
  }
}

TEST(SyncBatchNorm, AffineTrackingAndMomentumOptions) {
  for (const auto& options : {BatchNormOptions(4).affine(false), BatchNormOptions(4).track_running_stats(false),
                              BatchNormOptions(4).affine(false).track_running_stats(false),
                              BatchNormOptions(4).momentum(std::nullopt), BatchNormOptions(4).momentum(0.3).eps(0.1)}) {
    SyncBatchNorm sync(world(), options);
    torch::nn::BatchNorm1d whole(options);
    expect_equal_training(sync, whole, {4}, at::kFloat);
  }
}

TEST(SyncBatchNorm, VarianceIsAccurateForLargeMeans) {
  SyncBatchNorm sync(world(), BatchNormOptions(3).momentum(1.0));
  const at::Tensor values =
      (random(whole_shape({3, 50}), 1) + 3e4 + 10 * torch::arange(samples_before(world().size())).view({-1, 1, 1}))
          .to(at::kFloat);
  sync->forward(local_part(values));
  const at::Tensor expected = values.to(at::kDouble).transpose(0, 1).flatten(1).var(1, /*unbiased=*/true);
  EXPECT_TRUE(torch::allclose(sync->running_var.to(at::kDouble), expected, 1e-4, 0)) << sync->running_var << expected;
}

TEST(SyncBatchNorm, AnyStrides) {
  SyncBatchNorm sync(world(), BatchNormOptions(4));
  torch::nn::BatchNorm2d whole(4);
  const at::Tensor values = random(whole_shape({4, 6, 5}), 3).to(at::kFloat);
  const at::Tensor y = sync->forward(local_part(values).contiguous(at::MemoryFormat::ChannelsLast));
  expect_near(y, local_part(whole->forward(values)), at::kFloat, "channels last");
  expect_near(sync->forward(local_part(values).transpose(2, 3)), local_part(whole->forward(values.transpose(2, 3))),
              at::kFloat, "transposed");
}

TEST(SyncBatchNorm, EvalDoesNotCommunicate) {
  SyncBatchNorm sync(world(), BatchNormOptions(4)), untracked(world(), BatchNormOptions(4).track_running_stats(false));
  torch::nn::BatchNorm1d whole(4);
  expect_equal_training(sync, whole, {4}, at::kFloat);
  sync->eval();
  whole->eval();
  untracked->eval();
  if (world().rank() != 0) return;
  const at::Tensor x = random({5, 4}, 7).to(at::kFloat);
  expect_near(sync->forward(x), whole->forward(x.to(at::kDouble)), at::kFloat, "evaluation");
  torch::nn::BatchNorm1d alone(BatchNormOptions(4).track_running_stats(false));
  alone->eval();
  EXPECT_TRUE(torch::equal(untracked->forward(x), alone->forward(x)));
}

TEST(SyncBatchNorm, BackwardWithoutInputGradientDoesNotCommunicate) {
  SyncBatchNorm sync(world(), BatchNormOptions(4));
  const at::Tensor y = sync->forward(random({3 + world().rank(), 4}, world().rank()).to(at::kFloat));
  if (world().rank() == 0) y.pow(2).sum().backward();  // on one rank
  EXPECT_EQ(sync->weight.grad().defined(), world().rank() == 0);
}

TEST(SyncBatchNorm, TooFewValuesAreRejectedOnAllRanks) {
  SyncBatchNorm sync(world(), BatchNormOptions(4));
  EXPECT_THROW(sync->forward(torch::randn({world().rank() == 0 ? 1 : 0, 4})), base::UsageError);
  EXPECT_NO_THROW(sync->forward(torch::randn({world().rank() == 0 ? 2 : 0, 4})));
  if (world().size() > 1) {
    EXPECT_NO_THROW(sync->forward(torch::randn({1, 4})));
  }
  EXPECT_THROW(sync->forward(torch::randn({2, 5})), base::UsageError);
  EXPECT_THROW(sync->forward(torch::randn({4})), base::UsageError);
  EXPECT_THROW(sync->forward(torch::ones({2, 4}, at::kLong)), base::UsageError);
}

TEST(SyncBatchNorm, SecondDerivativesAreRejected) {
  SyncBatchNorm sync(world(), BatchNormOptions(4));
  const at::Tensor x = torch::randn({3, 4}).requires_grad_();
  const at::Tensor y = sync->forward(x).pow(2).sum();
  EXPECT_THROW(torch::autograd::grad({y}, {x}, {}, std::nullopt, /*create_graph=*/true), base::UsageError);
}

/// A typical user module: typed members, one of them inside a Sequential, and no clone().
struct ConvNetImpl : torch::nn::Module {
  ConvNetImpl() {
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 4, 3).padding(1).bias(false)));
    norm = register_module("norm", torch::nn::BatchNorm2d(4));
    body = register_module("body", torch::nn::Sequential(torch::nn::Flatten(), torch::nn::Linear(4 * 5 * 5, 6),
                                                         torch::nn::BatchNorm1d(6), torch::nn::Tanh()));
  }
  at::Tensor forward(const at::Tensor& x) { return body->forward(torch::relu(norm(conv(x)))); }
  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Sequential body{nullptr};
};
TORCH_MODULE(ConvNet);

/// Expects that training on all ranks, whose gradients DDP averages, equals training in one process on the whole batch.
void expect_same_training(ConvNet& net, torch::optim::SGD& optimizer, const ddp::DdpOptions& options) {
  ddp::DistributedDataParallel ddp(net, world(), options);
  ConvNet whole;
  copy_values(*net, *whole);
  whole->to(at::kDouble);
  torch::optim::SGD single(whole->parameters(), torch::optim::SGDOptions(0.1 / world().size()).momentum(0.9));
  for (int step = 0; step < 4; ++step) {
    const at::Tensor values = random(whole_shape({2, 5, 5}), step);
    optimizer.zero_grad();
    single.zero_grad();
    net->forward(local_part(values).to(at::kFloat)).pow(2).sum().backward();
    whole->forward(values).pow(2).sum().backward();
    optimizer.step();
    single.step();
  }
  const auto expected = whole->named_parameters();
  for (const auto& p : net->named_parameters()) {
    EXPECT_TRUE(same_bits(p.value().detach())) << p.key();
    EXPECT_TRUE(torch::allclose(p.value().to(at::kDouble), expected[p.key()], 1e-3, 1e-4))
        << p.key() << p.value() << expected[p.key()];
  }
  const auto buffers = whole->named_buffers();
  for (const auto& b : net->named_buffers())
    EXPECT_TRUE(torch::allclose(b.value().to(at::kDouble), buffers[b.key()].to(at::kDouble), 1e-3, 1e-4)) << b.key();
}

TEST(ConvertSyncBatchNorm, TypedModelTrainsAsOnWholeBatch) {
  for (const bool overlap : {true, false}) {
    torch::manual_seed(4);
    ConvNet net;
    torch::optim::SGD optimizer(net->parameters(),
                                torch::optim::SGDOptions(0.1).momentum(0.9));  // constructed before DDP
    EXPECT_EQ(convert_sync_batch_norm(net, world()), 2);
    expect_same_training(net, optimizer, {.bucket_bytes = {64, 64}, .overlap = overlap});
  }
}

TEST(ConvertSyncBatchNorm, UnconvertedModelDiffers) {
  torch::manual_seed(4);
  ConvNet net;
  const at::Tensor x = random({3, 2, 5, 5}, world().rank()).to(at::kFloat);
  net->forward(x);
  EXPECT_EQ(same_bits(net->norm->running_mean), world().size() == 1);
  convert_sync_batch_norm(net, world());
  net->norm->reset_running_stats();
  net->forward(x);
  EXPECT_TRUE(same_bits(net->norm->running_mean));
}

TEST(ConvertSyncBatchNorm, ConvertedModulesFollowTheirMode) {
  ConvNet net;
  net->norm->eval();
  convert_sync_batch_norm(net, world());
  EXPECT_FALSE(net->norm->is_training());
  EXPECT_TRUE(net->body->is_training());
  net->eval();
  if (world().rank() == 0) net->forward(torch::randn({1, 2, 5, 5}));  // on one rank
  net->train();
  net->forward(torch::randn({3, 2, 5, 5}));
  EXPECT_TRUE(same_bits(net->norm->running_var));
}

TEST(ConvertSyncBatchNorm, WorksInInferenceMode) {
  ConvNet net;
  convert_sync_batch_norm(net, world());
  const c10::InferenceMode inference;
  net->forward(torch::randn({3 + world().rank(), 2, 5, 5}));
  EXPECT_TRUE(same_bits(net->norm->running_mean.clone()));
}

TEST(ConvertSyncBatchNorm, MovedModulesStayConverted) {
  ConvNet net;
  convert_sync_batch_norm(net, world());
  net->to(at::kDouble);
  net->forward(random({3, 2, 5, 5}, world().rank()));
  EXPECT_TRUE(same_bits(net->norm->running_mean));
}

TEST(ConvertSyncBatchNorm, BackwardOverlapsGradientReduction) {
  torch::manual_seed(5);
  torch::nn::Sequential net;
  for (int i = 0; i < 6; ++i) {
    net->push_back(torch::nn::Linear(16, 16));
    net->push_back(torch::nn::BatchNorm1d(16));
  }
  EXPECT_EQ(convert_sync_batch_norm(net, world()), 6);
  ddp::DistributedDataParallel ddp(net, world(), {.bucket_bytes = {64, 64}});
  for (int step = 0; step < 30; ++step) {
    net->zero_grad();
    net->forward(batch_of(world().rank(), step, {4 + world().rank(), 16})).pow(2).sum().backward();
  }
  for (const auto& p : net->parameters()) EXPECT_TRUE(same_bits(p.grad()));
}

TEST(ConvertSyncBatchNorm, CheckpointsAreInterchangeableWithBatchNorm) {
  torch::nn::Sequential plain(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4)),
      converted(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4));
  torch::nn::Sequential synced(torch::nn::Linear(3, 4), SyncBatchNorm(world(), BatchNormOptions(4)));
  convert_sync_batch_norm(converted, world());
  const std::string file = std::filesystem::temp_directory_path() / ("sync_batch_norm." + std::to_string(::getpid()));
  for (auto* net : {&converted, &synced}) {
    checkpoint::save(**net, file);
    EXPECT_NO_THROW(checkpoint::load(*plain, file));
    EXPECT_TRUE(torch::equal((*net)->parameters()[0], plain->parameters()[0]));
    checkpoint::load(**net, file);
  }
  torch::save(converted, file);
  EXPECT_NO_THROW(torch::load(plain, file));
  EXPECT_NO_THROW(torch::load(converted, file));
  std::filesystem::remove(file);
}

/// A module that libtorch can clone until it contains a converted one.
struct CloneableNetImpl : torch::nn::Cloneable<CloneableNetImpl> {
  CloneableNetImpl() { CloneableNetImpl::reset(); }
  void reset() override { norm = register_module("norm", torch::nn::BatchNorm1d(3)); }
  at::Tensor forward(const at::Tensor& x) { return norm(x); }
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(CloneableNet);

TEST(ConvertSyncBatchNorm, CloningConvertedModuleIsRejected) {
  CloneableNet net;
  EXPECT_NO_THROW(net->clone());
  EXPECT_FALSE(nn::has_sync_batch_norm(*net));
  convert_sync_batch_norm(net, world());
  EXPECT_TRUE(nn::has_sync_batch_norm(*net));
  EXPECT_THROW(net->clone(), c10::Error);
  EXPECT_THROW(nn::DataParallel(net, {.devices = {at::kCPU, at::kCPU}}), base::UsageError);
}

TEST(ConvertSyncBatchNorm, ReconvertingAndConvertingSingleModule) {
  torch::nn::BatchNorm1d norm(3);
  comm::Group other = world().split(world().rank() % 2);
  EXPECT_EQ(convert_sync_batch_norm(norm, world()), 1);
  EXPECT_EQ(convert_sync_batch_norm(norm, other), 1);
  norm->forward(batch_of(world().rank() % 2, 0, {4, 3}));
  torch::nn::BatchNorm1d alone(3);
  alone->forward(batch_of(world().rank() % 2, 0, {4, 3}));
  EXPECT_TRUE(torch::allclose(norm->running_mean, alone->running_mean)) << "over the group of ranks with equal batches";
  norm = torch::nn::BatchNorm1d(3);  // replaces the converted module
  torch::nn::BatchNorm1d next(3);
  if (world().rank() == 0) next->forward(torch::randn({4, 3}));  // on one rank
}

TEST(ConvertSyncBatchNorm, UnconvertibleModulesAreRejected) {
  torch::nn::Sequential none(torch::nn::Linear(2, 2));
  EXPECT_THROW(convert_sync_batch_norm(none, world()), base::UsageError);
  torch::nn::Sequential unknown(torch::nn::BatchNorm1d(2),
                                torch::nn::BatchNorm1d(BatchNormOptions(2).affine(false).track_running_stats(false)));
  EXPECT_THAT(tests::message_of<base::UsageError>([&] { convert_sync_batch_norm(unknown, world()); }),
              ::testing::HasSubstr(": 1 has neither"));
  EXPECT_FALSE(nn::has_sync_batch_norm(*unknown));
  torch::nn::Sequential known(torch::nn::BatchNorm1d(BatchNormOptions(2).track_running_stats(false)),
                              torch::nn::BatchNorm1d(BatchNormOptions(2).affine(false)));
  EXPECT_EQ(convert_sync_batch_norm(known, world()), 2);
  const at::Tensor whole = random(whole_shape({2}), 1).to(at::kFloat);
  torch::nn::BatchNorm1d one(BatchNormOptions(2).affine(false));
  expect_near(known->forward(local_part(whole)), local_part(one->forward(one->forward(whole))), at::kFloat,
              "known by weight, and by running mean");
  known->eval();
  if (world().rank() == 0) known->forward(torch::randn({3, 2}));  // on one rank: statistics of its own batch
}

// A job of its own, because the error closes the group.
TEST(SyncBatchNormFailures, RankThatSkipsForwardIsReported) {
  ConvNet net;
  convert_sync_batch_norm(net, world());
  EXPECT_THAT(tests::message_of<base::DesyncError>([&] {
                if (world().rank() == 1)
                  world().barrier();
                else
                  net->forward(torch::randn({3, 2, 5, 5}));
              }),
              ::testing::HasSubstr("all_gather(norm.forward: float64[9])"));
}

}  // namespace
}  // namespace lockstep::tests::sync_batch_norm_test
