// A training step in C++ with Lockstep, to be measured beside Python's, which gpu_step.py is. What gpu.py runs.
//
//   bench_gpu_step IMPL MODEL SIZE PRECISION BATCH DEVICE THREADS [STEPS]
//
// IMPL: lockstep (DistributedDataParallel, torch's optimizer), lockstep-fused (an optimizer of lockstep::optim); MODEL:
// gpt (AdamW), resnet50 (SGD with momentum); SIZE: full, tiny; PRECISION: 32, bf16-mixed, fp16-mixed; BATCH: samples of
// all ranks in a step; DEVICE: cpu, cuda (this rank's). Says a line of JSON when it is ready, and one for each line
// "UNCOUNTED COUNTED" on stdin, steps to make: ms (of a counted step), losses (of all of them), peak_bytes and
// reserved_bytes. With STEPS it makes these instead, on several ranks if it is started so, and says their losses, means
// over the ranks. What went wrong is a line too: refused, or out_of_memory.
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <lockstep/base/parse.h>
#include <lockstep/lockstep.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "examples/03_char_gpt/gpt.h"
#include "examples/04_imagenet/resnet.h"

namespace {

using lockstep::Group;
using nlohmann::json;

struct StepOptions {
  std::string impl, model;
  bool tiny = false;
  lockstep::amp::Precision precision;
  std::int64_t batch = 0;
  std::string device;
  std::int64_t threads = 1, steps = 0;
};

/// A model, one batch for all ranks, and what is minimised.
struct Task {
  std::shared_ptr<torch::nn::Module> net;
  at::Tensor input, target;
  std::function<at::Tensor(const at::Tensor& input, const at::Tensor& target)> loss;
};

std::string one_of(const std::string& what, const std::string& word, const std::vector<std::string>& allowed) {
  std::string list;
  for (const std::string& each : allowed) {
    if (word == each) return word;
    list += (list.empty() ? "" : ", ") + each;
  }
  throw lockstep::UsageError(what + " is " + lockstep::base::quoted(word, 80) + "; allowed are " + list);
}

StepOptions parse_arguments(int count, char** words) {
  if (count != 8 && count != 9)
    throw lockstep::UsageError("bench_gpu_step IMPL MODEL SIZE PRECISION BATCH DEVICE THREADS [STEPS]");
  StepOptions wish;
  wish.impl = one_of("IMPL", words[1], {"lockstep", "lockstep-fused"});
  wish.model = one_of("MODEL", words[2], {"gpt", "resnet50"});
  wish.tiny = one_of("SIZE", words[3], {"full", "tiny"}) == "tiny";
  wish.precision = lockstep::amp::parse_precision(one_of("PRECISION", words[4], {"32", "bf16-mixed", "fp16-mixed"}));
  wish.batch = lockstep::base::parse_int_in_range("BATCH", words[5], 1, 1 << 24);
  wish.device = one_of("DEVICE", words[6], {"cpu", "cuda"});
  wish.threads = lockstep::base::parse_int_in_range("THREADS", words[7], 1, 1024);
  if (count == 9) wish.steps = lockstep::base::parse_int_in_range("STEPS", words[8], 1, 1000000);
  return wish;
}

/// The same numbers in every process, in C++ and in Python: drawn on the CPU in the order of the parameters' names.
void set_weights(torch::nn::Module& net) {
  const torch::NoGradGuard no_grad;
  torch::manual_seed(1);
  std::map<std::string, at::Tensor> parameters;
  for (const auto& parameter : net.named_parameters()) parameters[parameter.key()] = parameter.value();
  for (auto& [name, value] : parameters) {
    const bool is_bias = name.find("bias") != std::string::npos;
    if (value.dim() > 1)
      value.normal_(0, 1 / std::sqrt(static_cast<double>(value.numel() / value.size(0))));
    else
      value.fill_(is_bias ? 0 : 1);
  }
}

Task make_gpt(const StepOptions& wish) {
  const GptOptions options =
      wish.tiny ? GptOptions{.vocabulary = 101, .block = 16, .width = 32, .layers = 2, .heads = 4}
                : GptOptions{.vocabulary = 50257, .block = 1024, .width = 768, .layers = 12, .heads = 12};
  Gpt net(options);
  set_weights(*net);
  torch::manual_seed(2);
  const at::Tensor text = torch::randint(options.vocabulary, {wish.batch, options.block}, torch::kLong);
  const at::Tensor next = torch::randint(options.vocabulary, {wish.batch, options.block}, torch::kLong);
  return {net.ptr(), text, next,
          [net](const at::Tensor& input, const at::Tensor& target) mutable { return net->loss(input, target); }};
}

/// ResNet-50 on 224 x 224; tiny: ResNet-18 on 64 x 64.
Task make_resnet(const StepOptions& wish) {
  const std::int64_t side = wish.tiny ? 64 : 224, classes = wish.tiny ? 10 : 1000;
  resnet::Net net(resnet::kArchs.at(wish.tiny ? "resnet18" : "resnet50"), classes);
  set_weights(*net);
  torch::manual_seed(2);
  const at::Tensor images = torch::randn({wish.batch, 3, side, side});
  const at::Tensor labels = torch::randint(classes, {wish.batch}, torch::kLong);
  return {net.ptr(), images, labels, [net](const at::Tensor& input, const at::Tensor& target) mutable {
            return torch::nn::functional::cross_entropy(net->forward(input), target);
          }};
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const StepOptions& wish, torch::nn::Module& net,
                                                        lockstep::DistributedDataParallel& ddp) {
  const bool fused = wish.impl == "lockstep-fused";
  if (wish.model == "gpt") {
    if (fused) return std::make_unique<lockstep::optim::AdamW>(ddp, lockstep::optim::AdamWOptions{.lr = 3e-4});
    return std::make_unique<torch::optim::AdamW>(net.parameters(), torch::optim::AdamWOptions(3e-4));
  }
  if (fused)
    return std::make_unique<lockstep::optim::SGD>(ddp, lockstep::optim::SGDOptions{.lr = 1e-4, .momentum = 0.9});
  return std::make_unique<torch::optim::SGD>(net.parameters(), torch::optim::SGDOptions(1e-4).momentum(0.9));
}

/// This rank's training.
class Training {
 public:
  Training(const StepOptions& wish, Group world)
      : world_(std::move(world)),
        device_(world_.device()),
        precision_(wish.precision),
        task_(wish.model == "gpt" ? make_gpt(wish) : make_resnet(wish)) {
    if (wish.batch % world_.size() != 0)
      throw lockstep::UsageError("BATCH is " + std::to_string(wish.batch) + "; allowed with " +
                                 std::to_string(world_.size()) + " ranks are multiples of " +
                                 std::to_string(world_.size()));
    const std::int64_t own = wish.batch / world_.size();
    task_.input = task_.input.narrow(0, own * world_.rank(), own).to(device_);
    task_.target = task_.target.narrow(0, own * world_.rank(), own).to(device_);
    task_.net->to(device_);
    if (world_.size() > 1 && wish.model == "resnet50")
      lockstep::convert_sync_batch_norm(*task_.net, world_);  // means of all ranks' images, as one rank has them
    ddp_ = std::make_unique<lockstep::DistributedDataParallel>(*task_.net, world_);
    optimizer_ = make_optimizer(wish, *task_.net, *ddp_);
    scaler_ = std::make_unique<lockstep::GradScaler>(
        lockstep::amp::GradScalerOptions{.init_scale = 1024, .enabled = precision_.loss_scaling});
  }

  at::Tensor step() {
    optimizer_->zero_grad();
    at::Tensor loss;
    {
      const lockstep::Autocast autocast(
          {.device = device_.type(), .dtype = precision_.autocast, .enabled = precision_.autocast.has_value()});
      loss = task_.loss(task_.input, task_.target);
    }
    scaler_->scale(loss).backward();
    scaler_->step(*optimizer_);
    scaler_->update();
    return loss.detach();
  }

  void synchronize() const {
    if (!device_.is_cpu()) c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
  }

  json about() const {
    std::int64_t parameters = 0;
    for (const at::Tensor& parameter : task_.net->parameters()) parameters += parameter.numel();
    return {{"parameters", parameters}, {"device", device_.str()}, {"libtorch", TORCH_VERSION}};
  }

  /// Of the device's allocator, or of this process on the host.
  json memory() const {
    if (device_.is_cpu()) {
      rusage used{};
      ::getrusage(RUSAGE_SELF, &used);
      return {{"peak_bytes", used.ru_maxrss * 1024}, {"reserved_bytes", used.ru_maxrss * 1024}};
    }
    const auto stats = c10::getDeviceAllocator(device_.type())->getDeviceStats(device_.index());
    constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return {{"peak_bytes", stats.allocated_bytes[kAll].peak}, {"reserved_bytes", stats.reserved_bytes[kAll].peak}};
  }

 private:
  Group world_;
  const at::Device device_;
  const lockstep::amp::Precision precision_;
  Task task_;
  std::unique_ptr<lockstep::DistributedDataParallel> ddp_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::unique_ptr<lockstep::GradScaler> scaler_;
};

json take_turn(Training& training, std::int64_t uncounted, std::int64_t counted) {
  std::vector<at::Tensor> losses;
  for (std::int64_t i = 0; i < uncounted; ++i) losses.push_back(training.step());
  training.synchronize();
  const auto begin = std::chrono::steady_clock::now();
  for (std::int64_t i = 0; i < counted; ++i) losses.push_back(training.step());
  training.synchronize();
  const double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  json answer = training.memory();
  answer["ms"] = ms / static_cast<double>(std::max<std::int64_t>(counted, 1));
  for (const at::Tensor& loss : losses) answer["losses"].push_back(loss.item<double>());
  return answer;
}

void print_json(const json& answer) { std::cout << answer.dump() << std::endl; }

void run(const StepOptions& wish) {
  at::set_num_threads(static_cast<int>(wish.threads));
  Group world = lockstep::init({.device = wish.device});
  Training training(wish, world);
  if (wish.steps > 0) {
    std::vector<double> losses = take_turn(training, wish.steps, 0)["losses"];
    const at::Tensor means = torch::tensor(losses, torch::kDouble);
    world.all_reduce(means, lockstep::ReduceOp::kMean);
    losses.assign(means.data_ptr<double>(), means.data_ptr<double>() + means.numel());
    if (world.rank() == 0) print_json({{"losses", losses}, {"ranks", world.size()}, {"transport", world.transport()}});
    return;
  }
  print_json(training.about());
  for (std::int64_t uncounted = 0, counted = 0; std::cin >> uncounted >> counted;)
    print_json(take_turn(training, uncounted, counted));
}

/// Torch's text has a stack below its first line.
std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

int main(int argc, char** argv) try { run(parse_arguments(argc, argv)); } catch (const lockstep::Error& error) {
  print_json({{"refused", error.what()}});
  return lockstep::base::exit_code(error.cause());
} catch (const std::bad_alloc&) {
  print_json({{"out_of_memory", "std::bad_alloc"}});
} catch (const c10::Error& error) {
  const std::string text = error.what_without_backtrace();
  const bool full =
      dynamic_cast<const c10::OutOfMemoryError*>(&error) || text.find("can't allocate memory") != std::string::npos;
  print_json({{full ? "out_of_memory" : "refused", first_line(text)}});
  return full ? 0 : 1;
}
