// A training with the Trainer that can be killed at any time and records its steps:
//   training_resumable model=mlp|mnist|gpt [data=PATH] folder=RUNS history=FOLDER [name=NAME] [resume=auto|PATH]
//   [steps=N] [epochs=N] [batch=N] [save_every=N] [precision=NAME] [kill=RANK@STEP,...] [slow_ms=N] [plain=1]
//   [nodes=N] [devices=N]
// `batch` is the total over all ranks. At the start and after each step, each rank appends and flushes a line to
// HISTORY/rank.R.jsonl, with its samples and a hash of all weights before and after the step. kill: the rank sends
// itself SIGKILL in the forward of that step, once per entry; files in HISTORY record which kills happened. plain:
// without parts that depend on the number of ranks, such as dropout and unsynchronized batch norm. At the end rank 0
// prints "end=REASON steps=N epochs=N loss=L hash=H".
#include <fcntl.h>
#include <lockstep/base/content_hash.h>
#include <lockstep/base/env.h>
#include <lockstep/base/monotonic.h>
#include <lockstep/base/parse.h>
#include <lockstep/data/datasets/char_dataset.h>
#include <lockstep/data/datasets/corpus.h>
#include <lockstep/data/datasets/mnist.h>
#include <lockstep/data/datasets/vocabulary.h>
#include <lockstep/job/identity/identity.h>
#include <lockstep/lockstep.h>
#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>
#include <thread>

#include "examples/03_gpt/gpt.h"

namespace {

using lockstep::data::Example;
namespace training = lockstep::training;

using Words = std::map<std::string, std::string>;

std::int64_t int_argument(const Words& words, const std::string& name, std::int64_t default_value) {
  const auto found = words.find(name);
  return found == words.end() ? default_value
                              : lockstep::base::parse_int_in_range(name, found->second, -1, 1'000'000'000);
}
std::string string_argument(const Words& words, const std::string& name, const std::string& default_value = "") {
  const auto found = words.find(name);
  return found == words.end() ? default_value : found->second;
}

std::string hash_of(const torch::nn::Module& module) {
  lockstep::base::ContentHash hash;
  for (const torch::Tensor& tensor : module.parameters()) {
    const torch::Tensor bytes = tensor.detach().contiguous();
    hash.add(bytes.const_data_ptr(), bytes.nbytes());
  }
  for (const torch::Tensor& tensor : module.buffers()) hash.add(tensor.const_data_ptr(), tensor.nbytes());
  return hash.hex_digest();
}

/// Records the steps of one rank in a file.
class StepHistory {
 public:
  StepHistory(const std::string& folder, const lockstep::Group& world)
      : folder_(folder), rank_(world.rank()), world_size_(world.size()) {
    generation_ = lockstep::job::identity::identify(lockstep::base::Env::this_process()).generation;
    file_.open(folder + "/rank." + std::to_string(rank_) + ".jsonl", std::ios::app);
  }
  void record_start(std::int64_t step, const std::string& hash) {
    write_record("\"pid\": " + std::to_string(::getpid()) + ", \"begins_after\": " + std::to_string(step) +
                 ", \"after\": \"" + hash + "\"");
  }
  void record_samples(const std::vector<std::int64_t>& samples) {
    samples_.insert(samples_.end(), samples.begin(), samples.end());
  }
  void record_step(std::int64_t step, std::int64_t epoch, const std::string& before, const std::string& after) {
    std::string samples;
    for (const std::int64_t sample : samples_) samples += (samples.empty() ? "" : ", ") + std::to_string(sample);
    samples_.clear();
    write_record("\"step\": " + std::to_string(step) + ", \"epoch\": " + std::to_string(epoch) + ", \"samples\": [" +
                 samples + "], \"before\": \"" + before + "\", \"after\": \"" + after + "\"");
  }
  /// Whether this rank must kill itself in this step, for the first time.
  bool should_die_in(std::int64_t step, const std::string& kills) const {
    std::istringstream items(kills);
    for (std::string item; std::getline(items, item, ',');)
      if (item == std::to_string(rank_) + "@" + std::to_string(step))
        return ::close(::open((folder_ + "/killed." + item).c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0644)) ==
               0;
    return false;
  }

 private:
  void write_record(const std::string& fields) {
    file_ << "{\"mono_ns\": " << lockstep::base::monotonic_ns() << ", \"gen\": " << generation_
          << ", \"rank\": " << rank_ << ", \"world\": " << world_size_ << ", " << fields << "}" << std::endl;
  }
  std::string folder_;
  int rank_, world_size_, generation_ = 0;
  std::ofstream file_;
  std::vector<std::int64_t> samples_;
};

struct Mlp : torch::nn::Module {
  torch::Tensor loss(const torch::Tensor& data, const torch::Tensor& target) {
    return torch::nll_loss(
        torch::log_softmax(last(torch::dropout(torch::tanh(first(data)), dropout, is_training())), 1),
        target.remainder(10));
  }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(32, 24));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(24, 10));
  double dropout = 0.1;
};
struct ConvNet : torch::nn::Module {
  torch::Tensor loss(const torch::Tensor& data, const torch::Tensor& target) {
    torch::Tensor x = torch::avg_pool2d(torch::gelu(norm(first((data - 0.1307) / 0.3081))), 2);
    x = torch::dropout(torch::avg_pool2d(torch::gelu(second(x)), 2), dropout, is_training());
    return torch::nll_loss(torch::log_softmax(last(x.flatten(1)), 1), target.remainder(10));
  }
  torch::nn::Conv2d first = register_module("first", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 8, 3).padding(1)));
  torch::nn::BatchNorm2d norm = register_module("norm", torch::nn::BatchNorm2d(8));
  torch::nn::Conv2d second =
      register_module("second", torch::nn::Conv2d(torch::nn::Conv2dOptions(8, 16, 3).padding(1)));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(16 * 7 * 7, 10));
  double dropout = 0.1;
};
struct TextModel : torch::nn::Module {
  explicit TextModel(std::int64_t vocabulary)
      : gpt(register_module(
            "gpt", Gpt(GptOptions{.vocabulary = vocabulary, .block = 32, .width = 32, .layers = 2, .heads = 2}))) {}
  torch::Tensor loss(const torch::Tensor& data, const torch::Tensor& target) {
    return gpt->loss(data, target.narrow(1, 1, target.size(1) - 1));
  }
  Gpt gpt;
  double dropout = 0;  // unused
};

/// Returns the sample indices of a batch. A target encodes its index: as index * 10 + class, or as its first element.
std::vector<std::int64_t> samples_of(const torch::Tensor& target) {
  const torch::Tensor numbers = (target.dim() == 1 ? target.div(10, "floor") : target.select(1, 0)).contiguous();
  return {numbers.const_data_ptr<std::int64_t>(), numbers.const_data_ptr<std::int64_t>() + numbers.numel()};
}

template <typename Net>
struct RecordedModule : Net {
  using Net::Net;
  torch::Tensor training_step(Example& batch, training::StepLog& log) {
    history->record_samples(samples_of(batch.target));
    const torch::Tensor loss = this->loss(batch.data, batch.target);
    if (history->should_die_in(log.step + 1, kills)) ::kill(::getpid(), SIGKILL);
    return loss;
  }
  std::vector<training::OptimizerConfig> configure_optimizers(training::TrainingSetup& setup) {
    return {{std::make_shared<lockstep::optim::AdamW>(setup.ddp(), lockstep::optim::AdamWOptions{.lr = 2e-3}),
             lockstep::optim::cosine_decay({.steps = std::max<std::int64_t>(1, setup.total_steps())})}};
  }
  StepHistory* history = nullptr;
  std::string kills;
};

struct HistoryCallback : training::Callback {
  HistoryCallback(StepHistory& to, std::int64_t ms) : history(to), slow_ms(ms) {}
  void on_fit_start(training::FitContext& fit) override {
    history.record_start(fit.step(), before = hash_of(fit.module()));
  }
  void on_step(training::FitContext& fit) override {
    const std::string after = hash_of(fit.module());
    history.record_step(fit.step(), fit.epoch(), before, after);
    before = after;
    if (slow_ms > 0) std::this_thread::sleep_for(std::chrono::milliseconds(slow_ms));  // so that a test can kill it
  }
  StepHistory& history;
  std::int64_t slow_ms;
  std::string before;
};

template <typename Net, typename Dataset>
int fit(const Words& words, training::Trainer& trainer, std::shared_ptr<RecordedModule<Net>> net, Dataset dataset) {
  const lockstep::Group& world = trainer.world();
  StepHistory history(string_argument(words, "history"), world);
  net->history = &history;
  net->kills = string_argument(words, "kill");
  if (int_argument(words, "plain", 0) == 1) net->dropout = 0;
  const auto writer = std::make_shared<HistoryCallback>(history, int_argument(words, "slow_ms", 0));
  trainer.add(writer);
  const std::uint64_t size = dataset.size();
  auto loader = lockstep::data::make_loader(size, [dataset](std::size_t i) { return dataset(i); }, world,
                                            {.batch_size = int_argument(words, "batch", 12) / world.size(),
                                             .seed = 4,
                                             .mode = lockstep::data::ShardMode::kExact});
  const training::FitResult result = trainer.fit(net, loader);
  if (world.rank() == 0)
    std::cout << "end=" << static_cast<int>(result.reason) << " steps=" << result.steps << " epochs=" << result.epochs
              << " loss=" << result.train_values.front().second << " hash=" << hash_of(*net)
              << " folder=" << result.folder << std::endl;
  return result.exit_code();
}

template <typename Make>
struct GeneratedDataset {
  std::uint64_t count;
  Make make;
  std::uint64_t size() const { return count; }
  Example operator()(std::size_t i) const { return make(i); }
};

int run(const Words& words) {
  training::TrainerOptions options{.devices = static_cast<int>(int_argument(words, "devices", 1)),
                                   .max_epochs = int_argument(words, "epochs", -1),
                                   .max_steps = int_argument(words, "steps", -1),
                                   .precision = string_argument(words, "precision", "32"),
                                   .seed = 11};
  options.folder = string_argument(words, "folder");
  options.name = string_argument(words, "name", "fit");
  options.resume = string_argument(words, "resume");
  options.nodes = static_cast<int>(int_argument(words, "nodes", 1));
  options.sync_batch_norm = int_argument(words, "plain", 0) == 1 &&
                            string_argument(words, "model") == "mnist";  // the only model with batch norm
  options.save_every_n_steps = int_argument(words, "save_every", 5);
  options.log_every_n_steps = 1;
  options.progress_bar = options.model_summary = false;
  training::Trainer trainer(options);
  torch::manual_seed(trainer.world().rank());
  const std::string model = string_argument(words, "model", "mlp"), data = string_argument(words, "data");
  if (model == "mnist") {
    const auto images = lockstep::data::Mnist::load(data, lockstep::data::Mnist::Mode::kTest)
                            .slice(0, static_cast<std::size_t>(int_argument(words, "samples", 2000)));
    const auto make = [images](std::size_t i) {
      Example example = images.get(i);
      return Example{example.data, example.target + static_cast<std::int64_t>(i) * 10};
    };
    return fit<ConvNet>(words, trainer, std::make_shared<RecordedModule<ConvNet>>(),
                        GeneratedDataset<decltype(make)>{images.size(), make});
  }
  if (model == "gpt") {
    const auto corpus = lockstep::data::read_corpus(data);
    const auto vocabulary = lockstep::data::Vocabulary::from_text(corpus);
    const lockstep::data::CharDataset windows(vocabulary.encode(corpus), {.block_size = 32});
    const auto make = [windows](std::size_t i) {
      Example example = windows.get(i);
      return Example{example.data, torch::cat({torch::tensor({static_cast<std::int64_t>(i)}), example.target})};
    };
    const auto count =
        std::min<std::uint64_t>(windows.size(), static_cast<std::uint64_t>(int_argument(words, "samples", 2000)));
    return fit<TextModel>(words, trainer,
                          std::make_shared<RecordedModule<TextModel>>(static_cast<std::int64_t>(vocabulary.size())),
                          GeneratedDataset<decltype(make)>{count, make});
  }
  const auto make = [](std::size_t i) {
    const torch::Tensor x = (torch::arange(1, 33) * static_cast<std::int64_t>(i % 509 + 1)).remainder(97) / 48.5 - 1;
    return Example{x, torch::tensor(static_cast<std::int64_t>(i * 10 + i * 7 % 509 % 10))};
  };
  return fit<Mlp>(
      words, trainer, std::make_shared<RecordedModule<Mlp>>(),
      GeneratedDataset<decltype(make)>{static_cast<std::uint64_t>(int_argument(words, "samples", 100)), make});
}

}  // namespace

int main(int argc, char** argv) try {
  Words words;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    words[word.substr(0, word.find('='))] = word.substr(word.find('=') + 1);
  }
  return run(words);
} catch (const lockstep::Error& error) {
  std::cerr << "training_resumable: " << error.what() << std::endl;
  return lockstep::base::exit_code(error.cause());
}
