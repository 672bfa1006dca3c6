// Tests precision, nesting, restoring and warnings of Autocast.
#include "lockstep/amp/autocast.h"

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <stdexcept>
#include <thread>

#include "lockstep/base/error.h"
#include "tests/support/temp_dir.h"

namespace lockstep::amp {
namespace {

using testing::HasSubstr;

/// All settings that a guard changes.
struct Settings {
  bool enabled = at::autocast::is_autocast_enabled(at::kCPU);
  at::ScalarType dtype = at::autocast::get_autocast_dtype(at::kCPU);
  bool cache = at::autocast::is_autocast_cache_enabled();
  int nesting = at::autocast::increment_nesting();
  Settings() { at::autocast::decrement_nesting(); }
  bool operator==(const Settings&) const = default;
};

at::ScalarType matmul_dtype() { return torch::mm(torch::ones({2, 2}), torch::ones({2, 2})).scalar_type(); }

TEST(Autocast, LowersMatmulsButNotLosses) {
  const Settings before;
  {
    const Autocast guard;
    EXPECT_EQ(matmul_dtype(), at::kBFloat16);
    const at::Tensor low = torch::mm(torch::ones({2, 2}), torch::ones({2, 2}));
    EXPECT_EQ(torch::mse_loss(low, torch::zeros({2, 2})).scalar_type(), at::kFloat);
    EXPECT_EQ(Settings().nesting, before.nesting + 1);
  }
  EXPECT_EQ(matmul_dtype(), at::kFloat);
  EXPECT_EQ(Settings(), before);
}

TEST(Autocast, NestsAndCanBeDisabledInside) {
  const Settings before;
  {
    const Autocast outer({.dtype = at::kBFloat16, .cache = false});
    const Settings inside;
    EXPECT_FALSE(inside.cache);
    {
      const Autocast off({.enabled = false});
      EXPECT_EQ(matmul_dtype(), at::kFloat);
      {
        const Autocast again;
        EXPECT_EQ(matmul_dtype(), at::kBFloat16);
      }
      EXPECT_EQ(matmul_dtype(), at::kFloat);
    }
    EXPECT_EQ(matmul_dtype(), at::kBFloat16);
    {
      const DisableAutocast keep;
      EXPECT_EQ(matmul_dtype(), at::kFloat);
    }
    EXPECT_EQ(Settings(), inside);
  }
  EXPECT_EQ(Settings(), before);
}

TEST(Autocast, RestoresStateAfterException) {
  const Settings before;
  try {
    const Autocast outer;
    const Autocast inner({.dtype = at::kHalf, .cache = false});
    throw std::runtime_error("from the model");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(Settings(), before);
  EXPECT_EQ(matmul_dtype(), at::kFloat);
}

TEST(Autocast, IsThreadLocal) {
  const Autocast guard;
  at::ScalarType outside = at::kByte, inside = at::kByte;
  std::thread([&] {
    outside = matmul_dtype();
    const Autocast own;
    inside = matmul_dtype();
  }).join();
  EXPECT_EQ(outside, at::kFloat);
  EXPECT_EQ(inside, at::kBFloat16);
  EXPECT_EQ(matmul_dtype(), at::kBFloat16);
}

TEST(Autocast, ClearsCastCacheOnExit) {
  const at::Tensor weight = torch::ones({2, 2}, at::requires_grad());
  const auto product = [&] { return torch::mm(torch::ones({2, 2}), weight).sum().item<float>(); };
  const auto change = [&](double value) {
    const at::NoGradGuard no_grad;
    weight.fill_(value);
  };
  {
    const Autocast outer;
    EXPECT_EQ(product(), 8);
    change(2);
    const Autocast inner;
    EXPECT_EQ(product(), 8);  // the cast is cached
  }
  const Autocast guard;
  EXPECT_EQ(product(), 16);
  change(3);
  const Autocast without({.cache = false});
  EXPECT_EQ(product(), 24);
}

TEST(Autocast, NestedDtypeHasItsOwnCasts) {
  const at::Tensor weight = torch::ones({2, 2}, at::requires_grad());
  const auto dtype = [&] { return torch::mm(torch::ones({2, 2}), weight).scalar_type(); };
  const Autocast outer;
  EXPECT_EQ(dtype(), at::kBFloat16);
  {
    const Autocast inner({.dtype = at::kHalf});
    EXPECT_EQ(dtype(), at::kHalf);
  }
  EXPECT_EQ(dtype(), at::kBFloat16);
}

TEST(Autocast, WeightGradientsAreFloat32) {
  torch::nn::Linear layer(3, 2);
  at::Tensor loss;
  {
    const Autocast guard;
    loss = torch::mse_loss(layer(torch::ones({4, 3})), torch::zeros({4, 2}));
  }
  loss.backward();
  EXPECT_EQ(layer->weight.grad().scalar_type(), at::kFloat);
}

TEST(Autocast, RejectsUnsupportedDeviceAndDtype) {
  const Settings before;
  const auto error_of = [](const AutocastOptions& options) {
    return tests::message_of<base::UsageError>([&] { const Autocast guard(options); });
  };
  EXPECT_EQ(error_of({.dtype = at::kDouble}), "Autocast: dtype is Double on cpu; expected BFloat16 or Half");
  EXPECT_EQ(error_of({.device = at::kCUDA, .dtype = at::kInt}),
            "Autocast: dtype is Int on cuda; expected BFloat16 or Half");
  EXPECT_EQ(error_of({.dtype = at::kFloat, .enabled = false}),
            "Autocast: dtype is Float on cpu; expected BFloat16 or Half");
  EXPECT_EQ(error_of({.device = at::kMPS}), "Autocast: device is mps; expected cpu or cuda");
  EXPECT_EQ(Settings(), before);
}

TEST(Autocast, CudaAutocastDoesNotAffectCpu) {
  const Autocast guard({.device = at::kCUDA});
  EXPECT_EQ(matmul_dtype(), at::kFloat);
  EXPECT_TRUE(at::autocast::is_autocast_enabled(at::kCUDA));
  EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCUDA), at::kHalf);
}

// A death test, because it must run in a process in which the warning has not been logged before.
TEST(AutocastDeathTest, WarnsOnceAboutSlowFloat16) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto use_it = [] {
    testing::internal::CaptureStderr();
    for (int i = 0; i < 3; ++i) {
      const Autocast guard({.dtype = at::kHalf});
    }
    const std::string text = testing::internal::GetCapturedStderr();
    const auto first = text.find("50 times slower");
    const bool once = first != std::string::npos && text.find("50 times slower", first + 1) == std::string::npos;
    std::exit(once ? 0 : 1);
  };
  EXPECT_EXIT(use_it(), testing::ExitedWithCode(0), "");
}

TEST(SupportsBfloat16, ParsesCpuinfoFlags) {
  EXPECT_TRUE(supports_bfloat16("processor : 0\nflags\t\t: fpu avx512_bf16 wbnoinvd\n"));
  EXPECT_TRUE(supports_bfloat16("flags\t\t: fpu amx_tile amx_bf16\n"));
  EXPECT_FALSE(supports_bfloat16("flags\t\t: fpu avx512f avx512_bf16_not amx_int8\n"));
  EXPECT_FALSE(supports_bfloat16(""));
}

}  // namespace
}  // namespace lockstep::amp
