// The models of 04_imagenet: residual networks with 18, 34 and 50 layers (He et al., arXiv:1512.03385). Parameters and
// buffers have the names of torchvision, so that weights can be exchanged.
#pragma once

#include <torch/torch.h>

#include <array>
#include <cstdint>
#include <map>
#include <string>

namespace resnet {

using torch::nn::BatchNorm2d;
using torch::nn::Conv2d;

inline Conv2d convolution(std::int64_t from, std::int64_t to, std::int64_t kernel, std::int64_t stride) {
  return Conv2d(torch::nn::Conv2dOptions(from, to, kernel).stride(stride).padding(kernel / 2).bias(false));
}

/// Base of the residual blocks. Its shortcut() returns the input, or a projection of it if the block changes the size
/// or the number of channels.
struct BlockImpl : torch::nn::Module {
  BlockImpl(std::int64_t from, std::int64_t to, std::int64_t stride) {
    if (stride != 1 || from != to)
      downsample =
          register_module("downsample", torch::nn::Sequential(convolution(from, to, 1, stride), BatchNorm2d(to)));
  }
  torch::Tensor shortcut(const torch::Tensor& x) { return downsample.is_empty() ? x : downsample->forward(x); }

  torch::nn::Sequential downsample{nullptr};
};

/// A block with two 3 x 3 convolutions.
struct BasicImpl : BlockImpl {
  BasicImpl(std::int64_t from, std::int64_t width, std::int64_t stride)
      : BlockImpl(from, width, stride),
        conv1(register_module("conv1", convolution(from, width, 3, stride))),
        conv2(register_module("conv2", convolution(width, width, 3, 1))),
        bn1(register_module("bn1", BatchNorm2d(width))),
        bn2(register_module("bn2", BatchNorm2d(width))) {
    torch::nn::init::zeros_(bn2->weight);  // a block is initialized as its shortcut (Goyal et al., arXiv:1706.02677)
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor y = torch::relu(bn1(conv1(x)));
    return torch::relu(bn2(conv2(y)) + shortcut(x));
  }

  Conv2d conv1, conv2;
  BatchNorm2d bn1, bn2;
};
TORCH_MODULE(Basic);

/// A block with 1 x 1, 3 x 3 and 1 x 1 convolutions, the last of which has four times as many output channels. The
/// 3 x 3 convolution has the stride ("v1.5"), as in torchvision.
struct BottleneckImpl : BlockImpl {
  BottleneckImpl(std::int64_t from, std::int64_t width, std::int64_t stride)
      : BlockImpl(from, 4 * width, stride),
        conv1(register_module("conv1", convolution(from, width, 1, 1))),
        conv2(register_module("conv2", convolution(width, width, 3, stride))),
        conv3(register_module("conv3", convolution(width, 4 * width, 1, 1))),
        bn1(register_module("bn1", BatchNorm2d(width))),
        bn2(register_module("bn2", BatchNorm2d(width))),
        bn3(register_module("bn3", BatchNorm2d(4 * width))) {
    torch::nn::init::zeros_(bn3->weight);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor y = torch::relu(bn2(conv2(torch::relu(bn1(conv1(x))))));
    return torch::relu(bn3(conv3(y)) + shortcut(x));
  }

  Conv2d conv1, conv2, conv3;
  BatchNorm2d bn1, bn2, bn3;
};
TORCH_MODULE(Bottleneck);

struct Arch {
  bool bottleneck;
  std::array<int, 4> blocks;  ///< blocks per stage
};
inline const std::map<std::string, Arch> kArchs{
    {"resnet18", {false, {2, 2, 2, 2}}}, {"resnet34", {false, {3, 4, 6, 3}}}, {"resnet50", {true, {3, 4, 6, 3}}}};

/// Maps images (N, 3, height, width) to logits (N, classes).
struct NetImpl : torch::nn::Module {
  NetImpl(const Arch& arch, std::int64_t num_classes) {
    conv1 = register_module("conv1", convolution(3, 64, 7, 2));
    bn1 = register_module("bn1", BatchNorm2d(64));
    std::int64_t from = 64, width = 64;
    for (std::size_t stage = 0; stage < stages.size(); ++stage, width *= 2) {
      for (int block = 0; block < arch.blocks[stage]; ++block) {
        const std::int64_t stride = stage > 0 && block == 0 ? 2 : 1;
        if (arch.bottleneck)
          stages[stage]->push_back(Bottleneck(from, width, stride));
        else
          stages[stage]->push_back(Basic(from, width, stride));
        from = arch.bottleneck ? 4 * width : width;
      }
      register_module("layer" + std::to_string(stage + 1), stages[stage]);
    }
    fc = register_module("fc", torch::nn::Linear(from, num_classes));
    for (const auto& module : modules(/*include_self=*/false))
      if (const auto* convolution = module->as<Conv2d>())
        torch::nn::init::kaiming_normal_(convolution->weight, 0, torch::kFanOut, torch::kReLU);
  }

  torch::Tensor forward(torch::Tensor x) {
    x = torch::max_pool2d(torch::relu(bn1(conv1(x))), 3, 2, 1);
    for (auto& stage : stages) x = stage->forward(x);
    return fc(x.mean({2, 3}));
  }

  Conv2d conv1{nullptr};
  BatchNorm2d bn1{nullptr};
  std::array<torch::nn::Sequential, 4> stages;
  torch::nn::Linear fc{nullptr};
};
TORCH_MODULE(Net);

}  // namespace resnet
