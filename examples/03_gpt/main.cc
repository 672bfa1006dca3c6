// Trains GPT-2 on any text, from the size of a demonstration to 124 million parameters, and then generates text. Shows
// a fused optimizer, mixed precision with a GradScaler, accumulation, gradient clipping, recomputation, exact resuming,
// GPUs, and averaging between hosts every few steps. After `make build`, run it from the root of the repository:
//   build/release/bin/lockstep run -n 2 build/release/bin/03_gpt --corpus FILE_OR_FOLDER
// `make demo` trains it on the headers of libtorch; --help lists all options. For a vocabulary of pieces of words
// instead of characters, examples/python/make_tokens.py writes the file for --tokens.
#include <lockstep/data/datasets/char_dataset.h>
#include <lockstep/data/datasets/corpus.h>
#include <lockstep/data/datasets/vocabulary.h>
#include <lockstep/lockstep.h>
#include <lockstep/train/report/progress_bar.h>

#include <cstdio>
#include <fstream>
#include <map>
#include <numeric>

#include "examples/03_gpt/gpt.h"
#include "examples/arguments.h"

namespace {

using lockstep::data::CharDataset;

const std::map<std::string, GptOptions> kSizes = {
    {"demo", {.block = 128, .width = 128, .layers = 4, .heads = 4}},
    {"gpt2", {.block = 1024, .width = 768, .layers = 12, .heads = 12}},
    {"gpt2-medium", {.block = 1024, .width = 1024, .layers = 24, .heads = 16}}};

struct Options {
  std::string corpus, tokens, size = "demo", precision = "32", device, weights, save, loss_log, folder;
  std::int64_t steps = 600, batch_size = 16, accumulate = 1, block = 0, average_hosts_every = 1, seed = 1, sample = 300,
               save_every = 100;
  double lr = 3e-3, dropout = 0;
  bool recompute = false;
};

Options read_options(int argc, char** argv) {
  Options options;
  examples::Arguments arguments("Trains GPT-2 on a text and generates a sample.");
  arguments.text("--corpus", options.corpus, "text file, or directory with text files: tokens are characters");
  arguments.text("--tokens", options.tokens, "file of examples/python/make_tokens.py, instead of --corpus");
  arguments.text("--size", options.size, "demo, gpt2 (124 million parameters) or gpt2-medium");
  arguments.integer("--steps", options.steps, 1, 10000000, "updates of the parameters");
  arguments.integer("--batch-size", options.batch_size, 1, 65536, "windows of text per update, over all ranks");
  arguments.integer("--accumulate", options.accumulate, 1, 65536, "parts of the batch that a rank computes in turn");
  arguments.integer("--block", options.block, 0, 65536, "tokens in a window; 0: as many as the size has");
  arguments.number("--lr", options.lr, 1e-6, 1, "maximum learning rate");
  arguments.number("--dropout", options.dropout, 0, 0.99, "probability of dropout");
  arguments.text("--precision", options.precision, "32, bf16-mixed or fp16-mixed: precision of matrix products");
  arguments.flag("--recompute", options.recompute, "save memory: run each block again in backward()");
  arguments.text("--device", options.device, "auto (default: a GPU if there is one), cpu, cuda or cuda:N");
  arguments.integer("--host-sync-every", options.average_hosts_every, 1, 1000000,
                    "between hosts, average parameters every so many steps instead of gradients");
  arguments.integer("--seed", options.seed, 0, 1000000000, "seed of the weights, the windows and the sample");
  arguments.integer("--sample", options.sample, 0, 1000000, "tokens to generate at the end");
  arguments.text("--weights", options.weights, "start with the weights in this file (safetensors)");
  arguments.text("--save", options.save, "write the trained model to this file (safetensors)");
  arguments.text("--folder", options.folder, "keep checkpoints here; the same command resumes from the newest");
  arguments.integer("--save-every", options.save_every, 1, 10000000, "updates between two checkpoints");
  arguments.text("--loss-log", options.loss_log, "write the loss of each step on rank 0 to this file, one per line");
  arguments.parse(argc, argv);
  if (const auto precision = lockstep::amp::parse_precision(options.precision); precision.weights != torch::kFloat)
    throw lockstep::UsageError("--precision is \"" + options.precision +
                               "\"; expected 32, bf16-mixed or fp16-mixed, whose weights are float32");
  if (options.corpus.empty() == options.tokens.empty())
    throw lockstep::UsageError("--corpus is missing; expected a text file or a directory with text files, or --tokens");
  if (!kSizes.contains(options.size))
    throw lockstep::UsageError("--size is \"" + options.size + "\"; expected demo, gpt2 or gpt2-medium");
  return options;
}

/// A text as tokens, and the bytes that each token stands for.
struct Text {
  std::vector<std::int32_t> ids;
  std::vector<std::string> symbols;
};

Text read_characters(const std::string& corpus) {
  const std::string text = lockstep::data::read_corpus(corpus, {.max_bytes = std::uint64_t{256} << 20});
  auto vocabulary = lockstep::data::Vocabulary::from_text(text);
  if (vocabulary.size() > 256) vocabulary = lockstep::data::Vocabulary::bytes();
  return {vocabulary.encode(text), vocabulary.symbols()};
}

/// Reads "tokens", int32, and the bytes of token i: those of "bytes" from ends[i - 1] to ends[i].
Text read_tokens(const std::string& path) {
  const auto file = lockstep::checkpoint::load_tensors(path);
  const auto tensor = [&](const std::string& name, at::ScalarType dtype) {
    if (const auto found = file.find(name); found != file.end() && found->second.dim() == 1 &&
                                            found->second.scalar_type() == dtype && found->second.numel() > 0)
      return found->second.contiguous();
    throw lockstep::UsageError(path + " has no " + c10::toString(dtype) + " tensor \"" + name +
                               "\" of one dimension; expected a file of make_tokens.py");
  };
  const auto tokens = tensor("tokens", at::kInt), bytes = tensor("bytes", at::kByte), ends = tensor("ends", at::kLong);
  const auto* first = static_cast<const char*>(bytes.const_data_ptr());
  Text text;
  std::int64_t begin = 0;
  for (std::int64_t i = 0; i < ends.numel(); ++i) {
    const std::int64_t end = ends.const_data_ptr<std::int64_t>()[i];
    if (end < begin || end > bytes.numel()) throw lockstep::UsageError(path + ": \"ends\" is not in order");
    text.symbols.emplace_back(first + begin, first + end);
    begin = end;
  }
  if (tokens.min().item<int>() < 0 || tokens.max().item<std::int64_t>() >= ends.numel())
    throw lockstep::UsageError(path + ": a token is not in [0, " + std::to_string(ends.numel()) + ")");
  text.ids.assign(tokens.const_data_ptr<std::int32_t>(), tokens.const_data_ptr<std::int32_t>() + tokens.numel());
  return text;
}

/// Returns the mean loss over at most 256 windows that are spread over the text. Each window is evaluated by one rank.
/// Collective.
double evaluate(Gpt& model, const CharDataset& text, const lockstep::Group& world) {
  const torch::NoGradGuard no_grad;
  model->eval();
  const std::size_t count = std::min<std::size_t>(text.size(), 256);
  const auto window_at = [&](std::size_t i) { return text.get(i * text.size() / count); };
  auto loader = lockstep::data::make_loader(
      count, window_at, world,
      {.batch_size = 8, .shuffle = false, .mode = lockstep::data::ShardMode::kExact, .device = world.device()});
  torch::Tensor sum = torch::zeros({1}, at::dtype(torch::kFloat64).device(world.device()));
  for (auto& batch : loader.epoch(0)) sum += model->loss(batch.data, batch.target) * batch.data.size(0);
  world.all_reduce(sum);
  model->train();
  return sum.item<double>() / static_cast<double>(count);
}

/// Opens the file of losses after the lines of the first `steps` steps; a run that was killed may have written more.
std::ofstream open_loss_log(const std::string& path, std::int64_t steps) {
  if (path.empty()) return {};
  std::string kept;
  std::ifstream old(path);
  for (std::string line; steps > 0 && std::getline(old, line); --steps) kept += line + '\n';
  std::ofstream log(path);
  log.precision(17);
  log << kept;
  return log;
}

/// Returns false if the launcher has asked the training to stop.
bool train(Gpt& model, const CharDataset& text, const Options& options, const lockstep::Group& world) {
  std::optional<lockstep::TrainingState> state;
  if (!options.folder.empty())
    state.emplace(world, options.folder + "/checkpoints",
                  lockstep::training::TrainingStateOptions{.settings = {{"batch_size", options.batch_size}}});
  lockstep::DistributedDataParallel ddp(model, world,
                                        {.bucket_layout = state ? state->bucket_layout("ddp") : "",
                                         .average_hosts_every = static_cast<int>(options.average_hosts_every)});
  lockstep::optim::AdamW optimizer(ddp, {.lr = options.lr, .weight_decay = 0.01});
  auto loader = lockstep::data::make_loader(text, world,
                                            {.batch_size = options.batch_size / world.size() / options.accumulate,
                                             .seed = static_cast<std::uint64_t>(options.seed),
                                             .device = world.device()});
  const lockstep::amp::Precision precision = lockstep::amp::parse_precision(options.precision);
  lockstep::GradScaler scaler({.enabled = precision.loss_scaling});
  // A linear warm-up for a tenth of the steps, then a cosine decay towards a tenth of the maximum.
  const auto decay = lockstep::optim::cosine_decay({.steps = options.steps, .min_lr = options.lr / 10});
  lockstep::optim::Scheduler schedule(optimizer, lockstep::optim::warmup(options.steps / 10 + 1, decay, 0.01));
  lockstep::seed_everything(static_cast<std::uint64_t>(options.seed + 1 + world.rank()));  // other dropout on each rank
  if (state) {
    state->add("model", model).add("ddp", ddp).add("optimizer", optimizer).add("schedule", schedule);
    state->add("scaler", scaler).add("loader", loader).add_random_state().resume({.train_on = true});
  }
  const std::int64_t first = state ? state->step() : 0;
  std::int64_t step = first;
  lockstep::training::ProgressBar progress(
      world.rank(), {.steps_per_epoch = options.steps, .steps_done = step, .samples_per_step = options.batch_size});
  std::ofstream loss_log = open_loss_log(world.rank() == 0 ? options.loss_log : "", step);
  std::int64_t part = 0;
  torch::Tensor loss_of_step = torch::zeros({}, world.device());
  while (step < options.steps)
    for (auto& batch : loader) {
      torch::Tensor loss;
      {
        const lockstep::Autocast autocast(
            {.device = world.device().type(), .dtype = precision.autocast, .enabled = precision.autocast.has_value()});
        loss = model->loss(batch.data, batch.target) / options.accumulate;
      }
      loss_of_step += loss.detach();
      if (++part < options.accumulate) {
        const auto no_sync = ddp.no_sync();
        scaler.scale(loss).backward();
        continue;
      }
      scaler.scale(loss).backward();
      scaler.unscale_(optimizer);
      lockstep::clip_grad_norm(optimizer, 1.0);
      if (scaler.step(optimizer)) schedule.step();
      scaler.update();
      optimizer.zero_grad();
      if (loss_log.is_open()) loss_log << loss_of_step.item<double>() << std::endl;
      progress.step([&] { return lockstep::training::NamedValues{{"loss", loss_of_step.item<double>()}}; });
      loss_of_step.zero_();
      part = 0;
      const bool stop = world.stop_requested();  // the same on all ranks
      if (++step == options.steps) break;
      if (state && (stop || step % options.save_every == 0)) state->save_async(step);
      if (stop) return false;  // the destructor of `state` waits for the save
    }
  ddp.average_hosts();
  if (state && (step > first || !state->is_finished())) state->save(step, {.finished = true});
  return true;
}

/// Generates `length` tokens after `start`, each drawn from the distribution that the model predicts.
std::string generate_text(Gpt& model, const Text& text, const torch::Tensor& start, std::int64_t length) {
  const torch::NoGradGuard no_grad;
  model->eval();
  torch::Tensor context = start.unsqueeze(0);
  std::string generated;
  for (std::int64_t i = 0; i < length; ++i) {
    const torch::Tensor probabilities = torch::softmax(model->forward(context)[0][-1].div(0.8), -1);  // temperature 0.8
    const torch::Tensor next = torch::multinomial(probabilities, 1);
    generated += text.symbols[static_cast<std::size_t>(next.item<std::int64_t>())];
    context = torch::cat({context, next.unsqueeze(0)}, 1).slice(1, -start.size(0));
  }
  return generated;
}

int run(const Options& options) {
  lockstep::Group world = lockstep::init({.device = options.device});
  const bool first = world.rank() == 0;
  if (options.batch_size % (world.size() * options.accumulate) != 0)
    throw lockstep::UsageError("--batch-size is \"" + std::to_string(options.batch_size) +
                               "\"; expected a multiple of the number of ranks times --accumulate, " +
                               std::to_string(world.size() * options.accumulate));
  if (first) examples::require_writable_path("--save", options.save);
  if (first) examples::require_writable_path("--loss-log", options.loss_log);
  GptOptions size = kSizes.at(options.size);
  const std::int64_t block = options.block > 0 ? options.block : size.block;
  size.block = std::max(block, options.size == "demo" ? block : size.block);
  size.dropout = options.dropout;
  size.recompute = options.recompute;
  const Text text = options.tokens.empty() ? read_characters(options.corpus) : read_tokens(options.tokens);
  size.vocabulary = static_cast<std::int64_t>(text.symbols.size());
  const auto [training, validation] =
      CharDataset(text.ids, {.block_size = static_cast<std::size_t>(block)}).split(0.95);
  lockstep::seed_everything(static_cast<std::uint64_t>(options.seed));
  Gpt model(size);
  if (!options.weights.empty()) lockstep::load(model, options.weights);
  model->to(world.device());
  const auto parameters = model->parameters();
  const auto count = std::accumulate(parameters.begin(), parameters.end(), std::int64_t{0},
                                     [](std::int64_t sum, const torch::Tensor& p) { return sum + p.numel(); });
  if (first)
    std::printf("%zu tokens, %zu distinct; %lld parameters; %d ranks\n", text.ids.size(), text.symbols.size(),
                static_cast<long long>(count), world.size());
  const double before = evaluate(model, validation, world);
  if (!train(model, training, options, world)) return lockstep::kPreemptedExitCode;
  const double after = evaluate(model, validation, world);
  if (!first) return 0;
  std::printf("validation loss after: %.4f (before: %.4f)\n", after, before);
  if (!options.save.empty()) lockstep::save(model, options.save);
  const torch::Tensor start = validation.get(0).data.to(world.device());
  if (options.sample > 0) std::printf("\n%s\n", generate_text(model, text, start, options.sample).c_str());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::main(argc, argv, [](int count, char** words) { return run(read_options(count, words)); });
}
