// GPT-2: a decoder-only transformer that predicts the next token. Names, shapes and initial distribution of the
// parameters are those of GPT2LMHeadModel in transformers, so its files can be loaded and the other way round.
#pragma once

#include <lockstep/nn/recompute.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdint>

struct GptOptions {
  std::int64_t vocabulary = 256;
  std::int64_t block = 128;  ///< the longest context, in tokens
  std::int64_t width = 128;
  std::int64_t layers = 4;
  std::int64_t heads = 4;
  double dropout = 0;
  bool recompute = false;  ///< keep the input of each block only, and run the block again in backward()
};

/// A linear layer whose weight is [in, out], as in GPT-2's files. Takes an input of three dimensions faster than
/// torch::nn::Linear, which in C++, unlike in Python, adds the bias in a separate pass.
struct Conv1DImpl : torch::nn::Module {
  Conv1DImpl(std::int64_t in, std::int64_t out)
      : weight(register_parameter("weight", torch::empty({in, out}))),
        bias(register_parameter("bias", torch::zeros({out}))) {}
  torch::Tensor forward(const torch::Tensor& x) { return torch::linear(x, weight.t(), bias); }
  torch::Tensor weight, bias;
};
TORCH_MODULE(Conv1D);

struct AttentionImpl : torch::nn::Module {
  explicit AttentionImpl(const GptOptions& given)
      : options(given),
        c_attn(register_module("c_attn", Conv1D(given.width, 3 * given.width))),
        c_proj(register_module("c_proj", Conv1D(given.width, given.width))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    const auto batch = x.size(0), length = x.size(1), heads = options.heads, size = options.width / heads;
    const auto parts = c_attn(x).view({batch, length, 3, heads, size}).permute({2, 0, 3, 1, 4});
    const double dropout = is_training() ? options.dropout : 0;
    const auto mixed = torch::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, dropout, true);
    return c_proj(mixed.transpose(1, 2).reshape({batch, length, options.width}));
  }
  GptOptions options;
  Conv1D c_attn, c_proj;
};
TORCH_MODULE(Attention);

struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(std::int64_t width)
      : c_fc(register_module("c_fc", Conv1D(width, 4 * width))),
        c_proj(register_module("c_proj", Conv1D(4 * width, width))) {}
  torch::Tensor forward(const torch::Tensor& x) { return c_proj(torch::gelu(c_fc(x), "tanh")); }
  Conv1D c_fc, c_proj;
};
TORCH_MODULE(Mlp);

/// Causal self-attention, then a feed-forward network, both pre-norm with a residual connection.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const GptOptions& options)
      : dropout(options.dropout),
        ln_1(register_module("ln_1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.width})))),
        attn(register_module("attn", Attention(options))),
        ln_2(register_module("ln_2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.width})))),
        mlp(register_module("mlp", Mlp(options.width))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor y = x + torch::dropout(attn(ln_1(x)), dropout, is_training());
    return y + torch::dropout(mlp(ln_2(y)), dropout, is_training());
  }
  double dropout;
  torch::nn::LayerNorm ln_1;
  Attention attn;
  torch::nn::LayerNorm ln_2;
  Mlp mlp;
};
TORCH_MODULE(Block);

struct TransformerImpl : torch::nn::Module {
  explicit TransformerImpl(const GptOptions& given)
      : options(given),
        wte(register_module("wte", torch::nn::Embedding(given.vocabulary, given.width))),
        wpe(register_module("wpe", torch::nn::Embedding(given.block, given.width))),
        h(register_module("h", torch::nn::ModuleList())),
        ln_f(register_module("ln_f", torch::nn::LayerNorm(torch::nn::LayerNormOptions({given.width})))) {
    for (std::int64_t i = 0; i < options.layers; ++i) h->push_back(Block(options));
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    torch::Tensor x = wte(tokens) + wpe(torch::arange(tokens.size(1), tokens.options()));
    x = torch::dropout(x, options.dropout, is_training());
    // docs: begin recompute
    for (const auto& module : *h) {
      auto& block = *module->as<Block>();
      x = options.recompute ? lockstep::nn::recompute(block, x) : block.forward(x);
    }
    // docs: end recompute
    return ln_f(x);
  }
  GptOptions options;
  torch::nn::Embedding wte, wpe;
  torch::nn::ModuleList h;
  torch::nn::LayerNorm ln_f;
};
TORCH_MODULE(Transformer);

/// Maps tokens, int64 [batch, length], to the logits of the next one, float32 [batch, length, vocabulary].
struct GptImpl : torch::nn::Module {
  explicit GptImpl(const GptOptions& options) : transformer(register_module("transformer", Transformer(options))) {
    const torch::NoGradGuard no_grad;
    const double residual = 0.02 / std::sqrt(2.0 * static_cast<double>(options.layers));  // two sums in each block
    for (auto& [name, parameter] : named_parameters().pairs())
      if (parameter.dim() > 1)
        torch::nn::init::normal_(parameter, 0, name.ends_with("c_proj.weight") ? residual : 0.02);
  }
  /// The output layer shares its weights with the embedding.
  torch::Tensor forward(const torch::Tensor& tokens) {
    return torch::matmul(transformer(tokens), transformer->wte->weight.t());
  }
  /// Returns the mean loss over all tokens of the batch.
  torch::Tensor loss(const torch::Tensor& tokens, const torch::Tensor& next) {
    return torch::cross_entropy_loss(forward(tokens).flatten(0, 1).to(torch::kFloat), next.flatten());
  }
  Transformer transformer;
};
TORCH_MODULE(Gpt);
