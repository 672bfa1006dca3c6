// Tests of the networks of examples/04_imagenet: they have torchvision's numbers and names of parameters.
#include "examples/04_imagenet/resnet.h"

#include <gtest/gtest.h>

namespace {

struct ExpectedModel {
  const char* arch;
  std::int64_t num_parameters;
  std::size_t num_tensors;  // of Python's state_dict()
};

TEST(Resnet, MatchesTorchvisionsParameters) {
  for (const ExpectedModel& expected :
       {ExpectedModel{"resnet18", 11689512, 122}, {"resnet34", 21797672, 218}, {"resnet50", 25557032, 320}}) {
    resnet::Net net(resnet::kArchs.at(expected.arch), 1000);
    std::int64_t count = 0;
    for (const auto& parameter : net->parameters()) count += parameter.numel();
    EXPECT_EQ(count, expected.num_parameters) << expected.arch;
    EXPECT_EQ(net->parameters().size() + net->buffers().size(), expected.num_tensors) << expected.arch;
    const auto parameters = net->named_parameters();
    const auto buffers = net->named_buffers();
    for (const char* const name : {"conv1.weight", "bn1.bias", "layer1.0.conv2.weight", "layer2.0.downsample.0.weight",
                                   "layer2.0.downsample.1.bias", "layer4.1.bn2.weight", "fc.bias"})
      EXPECT_TRUE(parameters.contains(name)) << expected.arch << " " << name;
    EXPECT_TRUE(buffers.contains("layer3.1.bn1.running_var"));
  }
}

/// The 3 x 3 convolution has the stride.
TEST(Resnet, HalvesSidesFiveTimes) {
  const torch::NoGradGuard no_grad;
  resnet::Net net(resnet::kArchs.at("resnet50"), 7);
  net->eval();
  EXPECT_EQ(net->forward(torch::zeros({1, 3, 32, 32})).sizes(), at::IntArrayRef({1, 7}));
  auto block = net->stages[1]->ptr<resnet::BottleneckImpl>(0);
  EXPECT_EQ(block->conv1->options.stride()->at(0), 1);
  EXPECT_EQ(block->conv2->options.stride()->at(0), 2);
  EXPECT_EQ(block->forward(torch::zeros({1, 256, 16, 16})).sizes(), at::IntArrayRef({1, 512, 8, 8}));
}

/// Blocks are initialized as their shortcuts.
TEST(Resnet, StartsWithZeroBranches) {
  resnet::Net net(resnet::kArchs.at("resnet18"), 7);
  EXPECT_EQ(net->named_parameters()["layer1.0.bn2.weight"].abs().sum().item<float>(), 0);
  EXPECT_EQ(net->named_parameters()["layer1.0.bn1.weight"].sum().item<float>(), 64);
}

}  // namespace
