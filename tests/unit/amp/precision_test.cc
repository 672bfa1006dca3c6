// Tests presets, overrides and casts of Precision, and MasterWeights.
#include "lockstep/amp/precision.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/amp/autocast.h"
#include "lockstep/amp/grad_scaler.h"
#include "lockstep/amp/master_weights.h"
#include "lockstep/base/error.h"
#include "tests/support/temp_dir.h"

namespace lockstep::amp {
namespace {

using testing::HasSubstr;

std::string precision_error(const std::string& name, const PrecisionOverrides& overrides = {}) {
  return tests::message_of<base::UsageError>([&] { parse_precision(name, overrides); });
}

TEST(Precision, PresetsMatchDocumentedTable) {
  const Precision full;
  EXPECT_FALSE(full.autocast || full.master_weights || full.loss_scaling);
  EXPECT_EQ(parse_precision("32"), full);
  EXPECT_EQ(parse_precision("O0"), full);
  EXPECT_EQ(parse_precision("bf16-mixed"), Precision{.autocast = at::kBFloat16});
  const Precision mixed{.autocast = at::kHalf, .loss_scaling = true};
  EXPECT_EQ(parse_precision("fp16-mixed"), mixed);
  EXPECT_EQ(parse_precision("O1"), mixed);
  const Precision bf16{.weights = at::kBFloat16, .batch_norm_fp32 = false};
  EXPECT_EQ(parse_precision("bf16"), bf16);
  const Precision fp16{.weights = at::kHalf, .batch_norm_fp32 = false};
  EXPECT_EQ(parse_precision("fp16"), fp16);
  EXPECT_EQ(parse_precision("O3"), fp16);
  const Precision second{.weights = at::kHalf, .master_weights = true, .loss_scaling = true};
  EXPECT_EQ(parse_precision("O2"), second);
  const Precision bf16_mastered{.weights = at::kBFloat16, .batch_norm_fp32 = true, .master_weights = true};
  EXPECT_EQ(parse_precision("bf16", {.batch_norm_fp32 = true, .master_weights = true}), bf16_mastered);
  EXPECT_EQ(parse_precision("O3", {.batch_norm_fp32 = true}).batch_norm_fp32, true);
}

TEST(Precision, RejectsContradictorySettings) {
  EXPECT_EQ(precision_error("fp8"),
            "precision is \"fp8\"; expected 32, bf16-mixed, fp16-mixed, bf16, fp16, O0, O1, O2 or O3");
  EXPECT_THAT(precision_error("o1"), HasSubstr("precision is \"o1\""));
  EXPECT_THAT(precision_error("fp16-mixed", {.loss_scaling = false}),
              HasSubstr("precision fp16-mixed: float16 without loss scaling"));
  EXPECT_THAT(precision_error("O2", {.loss_scaling = false}), HasSubstr("float16 gradients that are not scaled"));
  EXPECT_THAT(precision_error("O2", {.batch_norm_fp32 = false}), HasSubstr("BatchNorm in float16"));
  EXPECT_THAT(precision_error("O2", {.master_weights = false}), HasSubstr("unscaling would make 0 again"));
  EXPECT_THAT(precision_error("fp16", {.loss_scaling = true}), HasSubstr("unscaling would make 0 again"));
  EXPECT_THAT(precision_error("32", {.batch_norm_fp32 = false}),
              HasSubstr("BatchNorm has lower precision than all other"));
  EXPECT_THAT(precision_error("O1", {.master_weights = true}), HasSubstr("float32 copies of weights that are float32"));
  EXPECT_THAT(precision_error("32", {.loss_scaling = true}), HasSubstr("nothing computes in float16"));
  EXPECT_THAT(precision_error("bf16-mixed", {.loss_scaling = true}), HasSubstr("nothing computes in float16"));
  EXPECT_THAT(precision_error("bf16", {.loss_scaling = true}), HasSubstr("bfloat16 has the range of float32"));
}

TEST(Precision, CastKeepsBatchNormAndIntegers) {
  torch::nn::ModuleList net(torch::nn::Linear(3, 4), torch::nn::ModuleList(torch::nn::BatchNorm1d(4)),
                            torch::nn::Linear(4, 1));
  cast(*net, parse_precision("O2"));
  for (const auto& item : net->named_parameters()) {
    EXPECT_EQ(item.value().scalar_type(), item.key().starts_with("1.") ? at::kFloat : at::kHalf) << item.key();
    EXPECT_TRUE(item.value().is_leaf() && item.value().requires_grad());
  }
  for (const auto& item : net->named_buffers())
    EXPECT_EQ(item.value().scalar_type(), item.key() == "1.0.num_batches_tracked" ? at::kLong : at::kFloat)
        << item.key();
  cast(*net, parse_precision("bf16"));
  EXPECT_EQ(net->named_buffers()["1.0.running_mean"].scalar_type(), at::kBFloat16);
  EXPECT_EQ(net->named_parameters()["1.0.weight"].scalar_type(), at::kBFloat16);
}

/// A normalisation layer that is not a class of torch. SyncBatchNorm is another one, on which this module does not
/// depend.
struct OtherNormImpl : torch::nn::Module {
  OtherNormImpl() {
    register_parameter("weight", torch::ones({4}));
    register_buffer("running_var", torch::full({4}, 1e6));
  }
};

TEST(Precision, TreatsRunningStatisticsAsBatchNorm) {
  OtherNormImpl norm;
  cast(norm, parse_precision("O2"));
  EXPECT_EQ(norm.named_parameters()["weight"].scalar_type(), at::kFloat);
  EXPECT_EQ(norm.named_buffers()["running_var"][0].item<double>(), 1e6);
}

TEST(MasterWeights, AccumulateUpdatesBelowHalfPrecision) {
  const at::Tensor weight = torch::full({2}, 1, at::kHalf).requires_grad_();
  const at::Tensor unused = torch::ones({2}).requires_grad_();
  MasterWeights master({weight, unused});
  torch::optim::SGD optimizer(master.parameters(), 1.0);
  GradScaler scaler({.init_scale = 1024, .growth_interval = 4});
  for (int step = 0; step < 8; ++step) {
    weight.mutable_grad() = at::Tensor();
    scaler.scale((weight * 1e-4).sum()).backward();  // half a unit in the last place below 1 is 2.4e-4
    master.copy_gradients_from_model();
    EXPECT_TRUE(scaler.step(optimizer));
    master.copy_values_to_model();
    scaler.update();
  }
  EXPECT_NEAR(master.parameters()[0][0].item<float>(), 1 - 8e-4, 1e-6);
  EXPECT_EQ(weight[0].item<float>(), torch::tensor(1 - 8e-4).to(at::kHalf).item<float>());
  EXPECT_FALSE(master.parameters()[1].grad().defined());
  EXPECT_EQ(scaler.get_scale(), 4096);
  weight.mutable_grad() = torch::full({2}, 1e6).to(at::kHalf);  // infinite
  master.copy_gradients_from_model();
  EXPECT_FALSE(scaler.step(optimizer));
  {
    const at::NoGradGuard no_grad;
    weight.fill_(3);
  }
  master.copy_values_from_model();
  EXPECT_EQ(master.parameters()[0][1].item<float>(), 3);
  EXPECT_THROW(MasterWeights({torch::ones({2}, at::kLong)}), base::UsageError);
}

}  // namespace
}  // namespace lockstep::amp
