// Tests that a Trainer handles batches and weights of any type: batches that are vectors of a program's own samples,
// and float64.
#include <cstdint>
#include <memory>
#include <vector>

#include "lockstep/train/trainer.h"
#include "tests/conformance/ddp/test_models.h"

namespace lockstep::tests::trainer_batches_test {
namespace {

using namespace lockstep::training;  // NOLINT(google-build-using-namespace): the tested module

TrainerOptions quiet(std::int64_t steps) {
  return {.max_steps = steps, .folder = "", .progress_bar = false, .model_summary = false};
}

/// A batch of these is a vector. The first tensor's size is not the number of samples.
struct TextSample {
  at::Tensor words;  // [length], which differs between samples
  double target = 0;
};
struct TextNetImpl : torch::nn::Module {
  double rate = 0;
  at::Tensor weight = register_parameter("weight", torch::ones({1}));
  at::Tensor mean_loss(const std::vector<TextSample>& batch, StepLog& log) {
    EXPECT_EQ(log.num_samples, static_cast<std::int64_t>(batch.size()));
    at::Tensor sum = torch::zeros({});
    for (const TextSample& one : batch) sum = sum + (one.words.mean() * weight - one.target).pow(2).sum();
    return sum / static_cast<double>(batch.size());
  }
  at::Tensor training_step(std::vector<TextSample>& batch, StepLog& log) { return mean_loss(batch, log); }
  at::Tensor validation_step(std::vector<TextSample>& batch, StepLog& log) { return mean_loss(batch, log); }
  std::vector<OptimizerConfig> configure_optimizers(TrainingSetup& setup) {
    return {{std::make_shared<torch::optim::SGD>(setup.parameters(), torch::optim::SGDOptions(rate))}};
  }
};
TORCH_MODULE(TextNet);

TEST(TrainerBatches, MeansCountTheSamplesOfABatchOfAnyType) {
  const auto make = [](std::size_t index) {
    return TextSample{.words = torch::full({static_cast<std::int64_t>(index % 5 + 1)}, static_cast<double>(index)),
                      .target = 1};
  };
  constexpr std::size_t kCount = 11;
  double sum = 0;
  for (std::size_t i = 0; i < kCount; ++i) sum += (static_cast<double>(i) - 1) * (static_cast<double>(i) - 1);
  TextNet net;
  Trainer trainer(quiet(3));
  const data::LoaderOptions exact{.batch_size = 3, .shuffle = false, .mode = data::ShardMode::kExact};
  const auto values = trainer.validate(net, data::make_loader(kCount, make, world(), exact));
  EXPECT_NEAR(require_value(values, "val_loss", "test"), sum / kCount, 1e-4);
  const auto padded = data::make_loader(kCount * static_cast<std::size_t>(world().size()), make, world(),
                                        {.batch_size = 4, .shuffle = false});
  EXPECT_EQ(trainer.fit(net, padded).steps, 3);  // one epoch of 11 samples
}

TEST(TrainerBatches, WeightsInDoublePrecisionStayDouble) {
  const auto make = [](std::size_t) { return TextSample{.words = torch::full({3}, 0.3, at::kDouble), .target = 0.1}; };
  TextNet net;
  net->rate = 0.1;
  net->to(at::kDouble);
  Trainer(quiet(3)).fit(net, data::make_loader(100, make, world(), {.batch_size = 2}));
  ASSERT_EQ(net->weight.scalar_type(), at::kDouble);
  double expected = 1;
  for (int step = 0; step < 3; ++step) expected -= 0.1 * 2 * (0.3 * expected - 0.1) * 0.3;
  EXPECT_NEAR(net->weight.item<double>(), expected, 1e-14);
}

}  // namespace
}  // namespace lockstep::tests::trainer_batches_test
