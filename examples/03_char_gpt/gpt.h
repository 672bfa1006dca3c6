// The model of 03_char_gpt: a decoder-only transformer that predicts the next character (GPT).
#pragma once

#include <torch/torch.h>

#include <cstdint>

struct GptOptions {
  std::int64_t vocabulary = 256;
  std::int64_t block = 128;  ///< length of the context, in characters
  std::int64_t width = 128;
  std::int64_t layers = 4;
  std::int64_t heads = 4;
};

/// Returns the output of a linear layer. For inputs with three dimensions it is faster than Linear::forward(), which in
/// C++, unlike in Python, adds the bias in a separate pass.
inline torch::Tensor apply_linear(const torch::nn::Linear& layer, const torch::Tensor& x) {
  return torch::linear(x, layer->weight, layer->bias);
}

/// Causal self-attention, then a feed-forward network, both pre-norm with a residual connection.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const GptOptions& options)
      : heads(options.heads),
        norm1(register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.width})))),
        norm2(register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.width})))),
        qkv(register_module("qkv", torch::nn::Linear(options.width, 3 * options.width))),
        mix(register_module("mix", torch::nn::Linear(options.width, options.width))),
        widen(register_module("widen", torch::nn::Linear(options.width, 4 * options.width))),
        narrow(register_module("narrow", torch::nn::Linear(4 * options.width, options.width))) {}

  torch::Tensor forward(torch::Tensor x) {
    x = x + attend(norm1(x));
    return x + apply_linear(narrow, torch::gelu(apply_linear(widen, norm2(x))));
  }

  torch::Tensor attend(const torch::Tensor& x) {
    const auto batch = x.size(0), length = x.size(1), width = x.size(2);
    const auto parts = apply_linear(qkv, x).view({batch, length, 3, heads, width / heads}).permute({2, 0, 3, 1, 4});
    const auto mixed = torch::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, true);
    return apply_linear(mix, mixed.transpose(1, 2).reshape({batch, length, width}));
  }

  std::int64_t heads;
  torch::nn::LayerNorm norm1, norm2;
  torch::nn::Linear qkv, mix, widen, narrow;
};
TORCH_MODULE(Block);

/// Maps characters, int64 [batch, length], to the log-probabilities of the next one, float32 [batch, length,
/// vocabulary].
struct GptImpl : torch::nn::Module {
  explicit GptImpl(const GptOptions& given)
      : options(given),
        characters(register_module("characters", torch::nn::Embedding(given.vocabulary, given.width))),
        positions(register_module("positions", torch::nn::Embedding(given.block, given.width))),
        blocks(register_module("blocks", torch::nn::ModuleList())),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({given.width})))) {
    for (std::int64_t i = 0; i < options.layers; ++i) blocks->push_back(Block(options));
    const torch::NoGradGuard no_grad;
    for (auto& parameter : named_parameters()) {
      if (parameter.key().find("norm") != std::string::npos) continue;
      parameter.value().dim() > 1 ? parameter.value().normal_(0, 0.02) : parameter.value().zero_();
    }
  }

  torch::Tensor forward(const torch::Tensor& text) {
    torch::Tensor x = characters(text) + positions(torch::arange(text.size(1), text.options()));
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    // The output layer shares its weights with the embedding.
    return torch::log_softmax(torch::matmul(norm(x), characters->weight.t()), -1);
  }

  /// Returns the mean loss over all characters of the batch.
  torch::Tensor loss(const torch::Tensor& text, const torch::Tensor& next) {
    return torch::nll_loss(forward(text).flatten(0, 1), next.flatten());
  }

  GptOptions options;
  torch::nn::Embedding characters, positions;
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm;
};
TORCH_MODULE(Gpt);
