// Trains a small transformer on any text, character by character, and then generates text. Shows mixed precision with a
// GradScaler, gradient clipping, GPUs, and averaging between hosts every few steps. After `make build`, run it from the
// root of the repository:
//   build/release/bin/lockstep run -n 2 build/release/bin/03_char_gpt --corpus FILE_OR_FOLDER
// `make demo` trains it on the headers of libtorch; --help lists all options.
#include <lockstep/data/datasets/char_dataset.h>
#include <lockstep/data/datasets/corpus.h>
#include <lockstep/data/datasets/vocabulary.h>
#include <lockstep/lockstep.h>
#include <lockstep/train/report/progress_bar.h>

#include <cstdio>
#include <fstream>

#include "examples/03_char_gpt/gpt.h"
#include "examples/arguments.h"

namespace {

using lockstep::data::CharDataset;
using lockstep::data::Vocabulary;

struct Options {
  std::string corpus, precision = "32", device, weights, save, loss_log;
  std::int64_t steps = 600, batch_size = 16, block = 128, average_hosts_every = 1, seed = 1, sample = 300;
  double lr = 3e-3;
};

Options read_options(int argc, char** argv) {
  Options options;
  examples::Arguments arguments("Trains a character-level GPT on a text and generates a sample.");
  arguments.text("--corpus", options.corpus, "text file, or directory with text files");
  arguments.integer("--steps", options.steps, 1, 10000000, "updates of the parameters");
  arguments.integer("--batch-size", options.batch_size, 1, 65536, "windows of text per step, over all ranks");
  arguments.integer("--block", options.block, 8, 4096, "characters in a window");
  arguments.number("--lr", options.lr, 1e-6, 1, "maximum learning rate");
  arguments.text("--precision", options.precision, "32, bf16-mixed or fp16-mixed: precision of matrix products");
  arguments.text("--device", options.device, "auto (default: a GPU if there is one), cpu, cuda or cuda:N");
  arguments.integer("--host-sync-every", options.average_hosts_every, 1, 1000000,
                    "between hosts, average parameters every so many steps instead of gradients");
  arguments.integer("--seed", options.seed, 0, 1000000000, "seed of the weights, the windows and the sample");
  arguments.integer("--sample", options.sample, 0, 1000000, "characters to generate at the end");
  arguments.text("--weights", options.weights, "start with the weights in this file (safetensors)");
  arguments.text("--save", options.save, "write the trained model to this file (safetensors)");
  arguments.text("--loss-log", options.loss_log, "write the loss of each step on rank 0 to this file, one per line");
  arguments.parse(argc, argv);
  if (const auto precision = lockstep::amp::parse_precision(options.precision); precision.weights != torch::kFloat)
    throw lockstep::UsageError("--precision is \"" + options.precision +
                               "\"; expected 32, bf16-mixed or fp16-mixed, whose weights are float32");
  if (options.corpus.empty())
    throw lockstep::UsageError("--corpus is missing; expected a text file or a directory with text files");
  return options;
}

/// Returns the mean loss over at most 256 windows that are spread over the text. Each window is evaluated by one rank.
/// Collective.
double evaluate(Gpt& model, const CharDataset& text, const lockstep::Group& world) {
  const torch::NoGradGuard no_grad;
  const std::size_t count = std::min<std::size_t>(text.size(), 256);
  const auto window_at = [&](std::size_t i) { return text.get(i * text.size() / count); };
  auto loader = lockstep::data::make_loader(
      count, window_at, world,
      {.batch_size = 32, .shuffle = false, .mode = lockstep::data::ShardMode::kExact, .device = world.device()});
  torch::Tensor sum = torch::zeros({1}, at::dtype(torch::kFloat64).device(world.device()));
  for (auto& batch : loader.epoch(0)) sum += model->loss(batch.data, batch.target) * batch.data.size(0);
  world.all_reduce(sum);
  return sum.item<double>() / static_cast<double>(count);
}

void train(Gpt& model, const CharDataset& text, const Options& options, const lockstep::Group& world) {
  lockstep::DistributedDataParallel ddp(model, world,
                                        {.average_hosts_every = static_cast<int>(options.average_hosts_every)});
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(options.lr).weight_decay(0.01));
  auto loader = lockstep::data::make_loader(text, world,
                                            {.batch_size = options.batch_size / world.size(),
                                             .seed = static_cast<std::uint64_t>(options.seed),
                                             .device = world.device()});
  const lockstep::amp::Precision precision = lockstep::amp::parse_precision(options.precision);
  lockstep::GradScaler scaler({.enabled = precision.loss_scaling,
                               .group = options.average_hosts_every > 1 ? std::optional(world) : std::nullopt});
  const auto loss_of = [&](const auto& batch) {
    const lockstep::Autocast autocast(
        {.device = world.device().type(), .dtype = precision.autocast, .enabled = precision.autocast.has_value()});
    return model->loss(batch.data, batch.target);
  };
  // A linear warm-up for a tenth of the steps, then a cosine decay towards a tenth of the maximum.
  const auto decay = lockstep::optim::cosine_decay({.steps = options.steps, .min_lr = options.lr / 10});
  lockstep::optim::Scheduler schedule(optimizer, lockstep::optim::warmup(options.steps / 10 + 1, decay, 0.01));
  lockstep::training::ProgressBar progress(world.rank(),
                                           {.steps_per_epoch = options.steps, .samples_per_step = options.batch_size});
  std::ofstream loss_log;
  if (world.rank() == 0 && !options.loss_log.empty()) loss_log.open(options.loss_log);
  loss_log.precision(17);
  std::int64_t step = 0;
  for (std::uint64_t epoch = 0; step < options.steps; ++epoch)
    for (auto& batch : loader.epoch(epoch)) {
      if (step++ == options.steps) break;
      optimizer.zero_grad();
      const torch::Tensor loss = loss_of(batch);
      scaler.scale(loss).backward();
      scaler.unscale_(optimizer);
      torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
      if (scaler.step(optimizer)) schedule.step();
      scaler.update();
      if (loss_log.is_open()) loss_log << loss.item<double>() << '\n';
      progress.step([&] { return lockstep::training::NamedValues{{"loss", loss.item<double>()}}; });
    }
  ddp.average_hosts();
}

/// Generates `length` characters after `start`, each drawn from the distribution that the model predicts.
std::string generate_text(Gpt& model, const Vocabulary& vocabulary, const torch::Tensor& start, std::int64_t length) {
  const torch::NoGradGuard no_grad;
  torch::Tensor context = start.unsqueeze(0);
  std::vector<std::int64_t> ids;
  while (static_cast<std::int64_t>(ids.size()) < length) {
    const torch::Tensor probabilities = model->forward(context)[0][-1].div(0.8).exp();  // temperature 0.8
    const torch::Tensor next = torch::multinomial(probabilities, 1);
    ids.push_back(next.item<std::int64_t>());
    context = torch::cat({context, next.unsqueeze(0)}, 1).slice(1, -model->options.block);
  }
  return vocabulary.decode(ids);
}

void run(const Options& options) {
  lockstep::Group world = lockstep::init({.device = options.device});
  const bool first = world.rank() == 0;
  if (options.batch_size % world.size() != 0)
    throw lockstep::UsageError("--batch-size is \"" + std::to_string(options.batch_size) +
                               "\"; expected a multiple of the number of ranks, " + std::to_string(world.size()));
  if (first) examples::require_writable_path("--save", options.save);
  if (first) examples::require_writable_path("--loss-log", options.loss_log);
  const std::string text = lockstep::data::read_corpus(options.corpus, {.max_bytes = std::uint64_t{16} << 20});
  Vocabulary vocabulary = Vocabulary::from_text(text);
  if (vocabulary.size() > 256) vocabulary = Vocabulary::bytes();
  const auto [training, validation] =
      CharDataset(vocabulary.encode(text), {.block_size = static_cast<std::size_t>(options.block)}).split(0.95);
  lockstep::seed_everything(static_cast<std::uint64_t>(options.seed));
  Gpt model(GptOptions{.vocabulary = static_cast<std::int64_t>(vocabulary.size()), .block = options.block});
  if (!options.weights.empty()) lockstep::load(model, options.weights);
  model->to(world.device());
  if (first) std::printf("%zu characters, %zu distinct; %d ranks\n", text.size(), vocabulary.size(), world.size());
  const double before = evaluate(model, validation, world);
  train(model, training, options, world);
  const double after = evaluate(model, validation, world);
  if (!first) return;
  std::printf("validation loss after: %.4f (before: %.4f)\n", after, before);
  if (!options.save.empty()) lockstep::save(model, options.save);
  const torch::Tensor start = validation.get(0).data.to(world.device());
  if (options.sample > 0) std::printf("\n%s\n", generate_text(model, vocabulary, start, options.sample).c_str());
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::main(argc, argv, [](int count, char** words) {
    run(read_options(count, words));
    return 0;
  });
}
