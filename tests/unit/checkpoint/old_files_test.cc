// Tests that files that version 0.1.0 wrote can be read.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <string>

#include "lockstep/checkpoint/module_io.h"

namespace lockstep::checkpoint {
namespace {

torch::nn::Sequential make_old_net() {
  return torch::nn::Sequential(torch::nn::Linear(4, 3), torch::nn::BatchNorm1d(torch::nn::BatchNorm1dOptions(3)));
}

TEST(OldFiles, SafetensorsAndTorchFileHaveTheSameValues) {
  const auto folder = std::filesystem::path(__FILE__).parent_path() / "version_0_1_0";
  auto from_safetensors = make_old_net();
  auto from_torch_file = make_old_net();
  load(from_safetensors, (folder / "model.safetensors").string());
  load(from_torch_file, (folder / "model.pt").string());
  for (const auto& item : from_safetensors->named_parameters())
    EXPECT_TRUE(torch::equal(item.value(), from_torch_file->named_parameters()[item.key()])) << item.key();
  for (const auto& item : from_safetensors->named_buffers())
    EXPECT_TRUE(torch::equal(item.value(), from_torch_file->named_buffers()[item.key()])) << item.key();
  EXPECT_EQ(from_safetensors->named_parameters()["0.weight"][0][0].item<float>(), 0.33025187253952026F);
  EXPECT_EQ(from_safetensors->named_parameters()["1.bias"][1].item<float>(), 0.009771768935024738F);
  EXPECT_EQ(from_safetensors->named_buffers()["1.running_var"][1].item<float>(), 0.8305680751800537F);
  EXPECT_EQ(from_safetensors->named_buffers()["1.num_batches_tracked"].item<std::int64_t>(), 2);
}

}  // namespace
}  // namespace lockstep::checkpoint
