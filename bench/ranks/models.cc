#include "bench/ranks/models.h"

#include <torch/torch.h>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"

namespace lockstep::bench {
namespace {

namespace nn = torch::nn;
using at::Tensor;

struct MlpShape {
  const char* name;
  std::int64_t width;
  int layers;
  std::int64_t batch;
};
constexpr MlpShape kMlps[] = {{"mlp-50m", 4096, 3, 16}, {"mlp-65m", 2560, 10, 16}, {"mlp-6m", 1024, 6, 64}};

class Mlp final : public Task {
 public:
  explicit Mlp(const MlpShape& shape)
      : input_(torch::randn({shape.batch, shape.width})), target_(torch::randn({shape.batch, shape.width})) {
    for (int i = 0; i < shape.layers; ++i) {
      net_->push_back(nn::Linear(shape.width, shape.width));
      if (i + 1 < shape.layers) net_->push_back(nn::ReLU());
    }
  }
  nn::Module& net() override { return *net_; }
  Tensor forward(std::int64_t batch) override { return net_->forward(input_.narrow(0, 0, batch)); }
  Tensor loss(const Tensor& output) override { return torch::mse_loss(output, target_.narrow(0, 0, output.size(0))); }
  std::int64_t batch() const override { return input_.size(0); }

 private:
  nn::Sequential net_;
  const Tensor input_, target_;
};

constexpr std::int64_t kWidth = 192, kHeads = 6, kBlocks = 4, kContext = 128, kVocabulary = 256;

/// A pre-norm transformer block, as in GPT-2.
struct BlockImpl : nn::Module {
  nn::LayerNorm before_attention{register_module("before_attention", nn::LayerNorm(nn::LayerNormOptions({kWidth})))};
  nn::Linear qkv{register_module("qkv", nn::Linear(kWidth, 3 * kWidth))};
  nn::Linear out{register_module("out", nn::Linear(kWidth, kWidth))};
  nn::LayerNorm before_mlp{register_module("before_mlp", nn::LayerNorm(nn::LayerNormOptions({kWidth})))};
  nn::Linear up{register_module("up", nn::Linear(kWidth, 4 * kWidth))};
  nn::Linear down{register_module("down", nn::Linear(4 * kWidth, kWidth))};

  Tensor forward(Tensor x) {
    const auto parts = qkv(before_attention(x))
                           .view({x.size(0), x.size(1), 3, kHeads, kWidth / kHeads})
                           .permute({2, 0, 3, 1, 4})
                           .unbind(0);
    const Tensor attended = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
    x = x + out(attended.transpose(1, 2).reshape(x.sizes()));
    return x + down(torch::gelu(up(before_mlp(x))));
  }
};
TORCH_MODULE(Block);

struct TransformerImpl : nn::Module {
  nn::Embedding tokens{register_module("tokens", nn::Embedding(kVocabulary, kWidth))};
  nn::Embedding places{register_module("places", nn::Embedding(kContext, kWidth))};
  nn::Sequential blocks{register_module("blocks", nn::Sequential())};
  nn::LayerNorm norm{register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})))};
  nn::Linear head{register_module("head", nn::Linear(kWidth, kVocabulary))};
  const Tensor positions = torch::arange(kContext);

  TransformerImpl() {
    for (int i = 0; i < kBlocks; ++i) blocks->push_back(Block());
  }
  Tensor forward(const Tensor& text) { return head(norm(blocks->forward(tokens(text) + places(positions)))); }
};
TORCH_MODULE(Transformer);

class Text final : public Task {
 public:
  nn::Module& net() override { return *net_; }
  Tensor forward(std::int64_t batch) override { return net_(text_.narrow(0, 0, batch)); }
  Tensor loss(const Tensor& output) override {
    return nn::functional::cross_entropy(output.flatten(0, 1), next_.narrow(0, 0, output.size(0)).flatten());
  }
  std::int64_t batch() const override { return text_.size(0); }

 private:
  Transformer net_;
  const Tensor text_ = torch::randint(kVocabulary, {4, kContext}, torch::kLong);
  const Tensor next_ = torch::randint(kVocabulary, {4, kContext}, torch::kLong);
};

class Images final : public Task {
 public:
  Images() {
    const std::int64_t channels[] = {3, 64, 128, 256, 256};
    for (int i = 0; i < 4; ++i) {
      net_->push_back(nn::Conv2d(nn::Conv2dOptions(channels[i], channels[i + 1], 3).padding(1)));
      net_->push_back(nn::ReLU());
      if (i < 3) net_->push_back(nn::MaxPool2d(2));
    }
    net_->push_back(nn::AdaptiveAvgPool2d(1));
    net_->push_back(nn::Flatten());
    net_->push_back(nn::Linear(256, 512));
    net_->push_back(nn::ReLU());
    net_->push_back(nn::Linear(512, 10));
  }
  nn::Module& net() override { return *net_; }
  Tensor forward(std::int64_t batch) override { return net_->forward(images_.narrow(0, 0, batch)); }
  Tensor loss(const Tensor& output) override {
    return nn::functional::cross_entropy(output, labels_.narrow(0, 0, output.size(0)));
  }
  std::int64_t batch() const override { return images_.size(0); }

 private:
  nn::Sequential net_;
  const Tensor images_ = torch::randn({8, 3, 32, 32});
  const Tensor labels_ = torch::randint(10, {8}, torch::kLong);
};

}  // namespace

std::unique_ptr<Task> make_task(const std::string& model) {
  for (const MlpShape& shape : kMlps)
    if (model == shape.name) return std::make_unique<Mlp>(shape);
  if (model == "transformer-2m") return std::make_unique<Text>();
  if (model == "cnn-1m") return std::make_unique<Images>();
  throw base::UsageError("the model is " + base::quoted(model, 80) +
                         "; expected mlp-50m, mlp-65m, mlp-6m, transformer-2m or cnn-1m");
}

}  // namespace lockstep::bench
