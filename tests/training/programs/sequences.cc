// Language models and other sequences: tied weights, truncated backpropagation through time, a transformer.
#include <tuple>

#include "tests/training/programs/program.h"

namespace lockstep::tests::programs::sequences {
namespace {

constexpr std::int64_t kWords = 11;

// A language model whose output layer is the embedding: one parameter with two uses.
struct TiedByUseImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& words) {
    const torch::Tensor x = torch::tanh(hidden(embedding(words)));
    return torch::log_softmax(x.matmul(embedding->weight.t()), -1);
  }
  torch::nn::Embedding embedding = register_module("embedding", torch::nn::Embedding(kWords, 6));
  torch::nn::Linear hidden = register_module("hidden", torch::nn::Linear(6, 6));
};
TORCH_MODULE(TiedByUse);

// The same with one parameter under two names.
struct TiedByNameImpl : torch::nn::Module {
  TiedByNameImpl() {
    embedding = register_parameter("embedding", torch::randn({kWords, 6}));
    output = register_parameter("output", embedding);
    hidden = register_module("hidden", torch::nn::Linear(6, 6));
  }
  torch::Tensor forward(const torch::Tensor& words) {
    const torch::Tensor x = torch::tanh(hidden(torch::embedding(embedding, words)));
    return torch::log_softmax(torch::nn::functional::linear(x, output), -1);
  }
  torch::Tensor embedding, output;
  torch::nn::Linear hidden{nullptr};
};
TORCH_MODULE(TiedByName);

template <typename Net>
void train_language_model(Run& run, Net& net, const std::vector<torch::Tensor>& parameters) {
  DistributedDataParallel ddp(net, run.world);
  const auto optimizer = make_sgd(run, ddp, parameters, 0.4);
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor words = run.part(integers(step, kWords, {kGlobalBatch, 5}));
    const torch::Tensor next = (words * 3 + 1).remainder(kWords);
    optimizer->zero_grad();
    const torch::Tensor loss = torch::nll_loss(net->forward(words).flatten(0, 1), next.flatten());
    loss.backward();
    optimizer->step();
    run.add_loss(loss);
  }
  run.add("net", *net);
}

void tied_by_use(Run& run) {
  auto net = make_module<TiedByUse>(run);
  train_language_model(run, net, net->parameters());
}

void tied_by_name(Run& run) {
  auto net = make_module<TiedByName>(run);
  expect(net->embedding.is_same(net->output), "to() keeps the two names of one tensor");
  // Module::parameters() lists a tensor once for each name, which is once too often for an optimizer of torch.
  std::vector<torch::Tensor> parameters = {net->embedding};
  for (const torch::Tensor& parameter : net->hidden->parameters()) parameters.push_back(parameter);
  train_language_model(run, net, parameters);
}

// An LSTM with truncated backpropagation through time: the hidden state is cut between windows of a long sequence, and
// continues into the next sequence. Each window has a backward pass, each sequence one update.

struct RecurrentImpl : torch::nn::Module {
  torch::nn::LSTM lstm =
      register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(2, 5).num_layers(2).batch_first(true)));
  torch::nn::Linear output = register_module("output", torch::nn::Linear(5, 2));
};
TORCH_MODULE(Recurrent);

/// Returns a wave, whose phase differs for each sample and whose time continues from step to step.
torch::Tensor wave(std::int64_t step, std::int64_t length) {
  const torch::Tensor time = (torch::arange(length + 1, torch::kFloat64) + static_cast<double>(step * length)) / 3;
  const torch::Tensor phase = torch::arange(kGlobalBatch, torch::kFloat64).view({-1, 1});
  return torch::stack({torch::sin(time + phase), torch::cos(time * 0.7 + phase)}, 2);
}

void train_recurrent(Run& run, bool one_reduction) {
  constexpr std::int64_t kLength = 12, kWindow = 4;
  auto net = make_module<Recurrent>(run);
  DistributedDataParallel ddp(net, run.world);
  const auto optimizer = make_sgd(run, ddp, net->parameters(), 0.2, 0.9);
  const std::int64_t samples = kGlobalBatch / run.world.size();
  auto hidden =
      std::make_tuple(torch::zeros({2, samples, 5}, torch::kFloat64), torch::zeros({2, samples, 5}, torch::kFloat64));
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor sequence = run.part(wave(step, kLength));
    optimizer->zero_grad();
    for (std::int64_t begin = 0; begin < kLength; begin += kWindow) {
      hidden = {std::get<0>(hidden).detach(), std::get<1>(hidden).detach()};
      torch::Tensor out;
      std::tie(out, hidden) = net->lstm->forward(sequence.slice(1, begin, begin + kWindow), hidden);
      const torch::Tensor loss = torch::mse_loss(net->output(out), sequence.slice(1, begin + 1, begin + kWindow + 1));
      if (one_reduction && begin + kWindow < kLength) {
        const auto guard = ddp.no_sync();
        loss.backward();
      } else {
        loss.backward();
      }
      run.add_loss(loss);
    }
    optimizer->step();
  }
  run.add("net", *net);
}

void lstm_truncated(Run& run) { train_recurrent(run, false); }

void lstm_truncated_no_sync(Run& run) { train_recurrent(run, true); }

// A transformer encoder with gradient clipping, warm-up and two groups of parameters with different decay.

struct EncoderImpl : torch::nn::Module {
  EncoderImpl() {
    embedding = register_module("embedding", torch::nn::Embedding(kWords, 8));
    encoder = register_module("encoder",
                              torch::nn::TransformerEncoder(
                                  torch::nn::TransformerEncoderLayer(
                                      torch::nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(16).dropout(0)),
                                  2));
    output = register_module("output", torch::nn::Linear(8, kWords));
    positions = register_parameter("positions", 0.1 * torch::randn({6, 1, 8}));
  }
  torch::Tensor forward(const torch::Tensor& words) {  // [length, batch]
    const torch::Tensor mask = torch::full({words.size(0), words.size(0)}, -1e9, torch::kFloat64).triu(1);
    return output(encoder(embedding(words) + positions, mask));
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::TransformerEncoder encoder{nullptr};
  torch::nn::Linear output{nullptr};
  torch::Tensor positions;
};
TORCH_MODULE(Encoder);

std::unique_ptr<torch::optim::Optimizer> make_adamw(const Run& run, const DistributedDataParallel& ddp,
                                                    const torch::nn::Module& net) {
  std::vector<torch::Tensor> decayed, others;
  for (const torch::Tensor& parameter : net.parameters()) (parameter.dim() > 1 ? decayed : others).push_back(parameter);
  if (run.fused)
    return std::make_unique<optim::AdamW>(
        ddp, optim::AdamWOptions{.lr = 0.01, .weight_decay = 0.1},
        std::vector<optim::AdamW::Group>{{.parameters = others, .options = {.lr = 0.02, .weight_decay = 0}}});
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(decayed,
                      std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(0.01).weight_decay(0.1)));
  groups.emplace_back(others,
                      std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(0.02).weight_decay(0)));
  return std::make_unique<torch::optim::AdamW>(groups, torch::optim::AdamWOptions(0.01));
}

void transformer(Run& run) {
  auto net = make_module<Encoder>(run);
  DistributedDataParallel ddp(net, run.world);
  const auto optimizer = make_adamw(run, ddp, *net);
  optim::Scheduler schedule(*optimizer, optim::warmup(3, optim::cosine_decay({.steps = kSteps - 3})));
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor words = run.part(integers(step, kWords, {6, kGlobalBatch}), 1);
    const torch::Tensor target = words.cumsum(0).remainder(kWords);
    optimizer->zero_grad();
    const torch::Tensor loss = torch::cross_entropy_loss(net->forward(words).flatten(0, 1), target.flatten());
    loss.backward();
    run.add("norm", clip_grad_norm(*optimizer, 0.7).item<double>());
    optimizer->step();
    schedule.step();
    run.add_loss(loss);
  }
  run.add("net", *net);
}

}  // namespace
}  // namespace lockstep::tests::programs::sequences

namespace lockstep::tests::programs {

std::vector<Program> sequence_programs() {
  std::vector<Program> programs;
  const auto add = [&](const std::vector<Program>& more) { programs.insert(programs.end(), more.begin(), more.end()); };
  add(with_all_optimizers("tied_by_use", sequences::tied_by_use));
  add(with_both_optimizers("tied_by_name", sequences::tied_by_name));
  add(with_both_optimizers("lstm_truncated", sequences::lstm_truncated));
  programs.push_back(
      {.name = "lstm_truncated_no_sync", .train = sequences::lstm_truncated_no_sync, .reference = "lstm_truncated"});
  add(with_both_optimizers("transformer", sequences::transformer));
  return programs;
}

}  // namespace lockstep::tests::programs
