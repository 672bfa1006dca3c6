// A training step in C++ with Lockstep, compared with that of gpu_step.py in Python. Started by gpu.py.
//
//   bench_gpu_step IMPL MODEL SIZE PRECISION BATCH DEVICE THREADS [STEPS]
//
// IMPL: lockstep (DistributedDataParallel, torch's optimizer), lockstep-fused (an optimizer of lockstep::optim); MODEL:
// gpt (AdamW), resnet50 (SGD with momentum); SIZE: full, tiny; PRECISION: 32, bf16-mixed, fp16-mixed; BATCH: samples of
// all ranks in a step; DEVICE: cpu, cuda (the GPU of this rank). Prints a line of JSON when it is ready, and one for
// each line "WARM_UP MEASURED" on stdin, which are numbers of steps: ms (per measured step), losses (of all steps),
// peak_bytes and reserved_bytes. With STEPS, which also works on several ranks, it runs that many steps and prints
// their losses as means over the ranks. Errors are lines of JSON as well: refused, or out_of_memory.
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

/// A model, one batch for all ranks, and a loss.
struct Task {
  std::shared_ptr<torch::nn::Module> net;
  at::Tensor input, target;
  std::function<at::Tensor(const at::Tensor& input, const at::Tensor& target)> loss;
};

std::string one_of(const std::string& name, const std::string& value, const std::vector<std::string>& choices) {
  std::string list;
  for (const std::string& choice : choices) {
    if (value == choice) return value;
    list += (list.empty() ? "" : ", ") + choice;
  }
  throw lockstep::UsageError(name + " is " + lockstep::base::quoted(value, 80) + "; expected one of " + list);
}

StepOptions parse_arguments(int count, char** words) {
  if (count != 8 && count != 9)
    throw lockstep::UsageError("usage: bench_gpu_step IMPL MODEL SIZE PRECISION BATCH DEVICE THREADS [STEPS]");
  StepOptions options;
  options.impl = one_of("IMPL", words[1], {"lockstep", "lockstep-fused"});
  options.model = one_of("MODEL", words[2], {"gpt", "resnet50"});
  options.tiny = one_of("SIZE", words[3], {"full", "tiny"}) == "tiny";
  options.precision = lockstep::amp::parse_precision(one_of("PRECISION", words[4], {"32", "bf16-mixed", "fp16-mixed"}));
  options.batch = lockstep::base::parse_int_in_range("BATCH", words[5], 1, 1 << 24);
  options.device = one_of("DEVICE", words[6], {"cpu", "cuda"});
  options.threads = lockstep::base::parse_int_in_range("THREADS", words[7], 1, 1024);
  if (count == 9) options.steps = lockstep::base::parse_int_in_range("STEPS", words[8], 1, 1000000);
  return options;
}

/// Sets weights that are equal in every process, in C++ and in Python: drawn on the CPU in the order of names.
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

Task make_gpt(const StepOptions& step_options) {
  const GptOptions options =
      step_options.tiny ? GptOptions{.vocabulary = 101, .block = 16, .width = 32, .layers = 2, .heads = 4}
                        : GptOptions{.vocabulary = 50257, .block = 1024, .width = 768, .layers = 12, .heads = 12};
  Gpt net(options);
  set_weights(*net);
  torch::manual_seed(2);
  const at::Tensor text = torch::randint(options.vocabulary, {step_options.batch, options.block}, torch::kLong);
  const at::Tensor next = torch::randint(options.vocabulary, {step_options.batch, options.block}, torch::kLong);
  return {net.ptr(), text, next,
          [net](const at::Tensor& input, const at::Tensor& target) mutable { return net->loss(input, target); }};
}

/// Makes ResNet-50 on images of 224 x 224 pixels; tiny: ResNet-18 on 64 x 64.
Task make_resnet(const StepOptions& options) {
  const std::int64_t side = options.tiny ? 64 : 224, classes = options.tiny ? 10 : 1000;
  resnet::Net net(resnet::kArchs.at(options.tiny ? "resnet18" : "resnet50"), classes);
  set_weights(*net);
  torch::manual_seed(2);
  const at::Tensor images = torch::randn({options.batch, 3, side, side});
  const at::Tensor labels = torch::randint(classes, {options.batch}, torch::kLong);
  return {net.ptr(), images, labels, [net](const at::Tensor& input, const at::Tensor& target) mutable {
            return torch::nn::functional::cross_entropy(net->forward(input), target);
          }};
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const StepOptions& options, torch::nn::Module& net,
                                                        lockstep::DistributedDataParallel& ddp) {
  const bool fused = options.impl == "lockstep-fused";
  if (options.model == "gpt") {
    if (fused) return std::make_unique<lockstep::optim::AdamW>(ddp, lockstep::optim::AdamWOptions{.lr = 3e-4});
    return std::make_unique<torch::optim::AdamW>(net.parameters(), torch::optim::AdamWOptions(3e-4));
  }
  if (fused)
    return std::make_unique<lockstep::optim::SGD>(ddp, lockstep::optim::SGDOptions{.lr = 1e-4, .momentum = 0.9});
  return std::make_unique<torch::optim::SGD>(net.parameters(), torch::optim::SGDOptions(1e-4).momentum(0.9));
}

/// Trains the model on this rank and measures its steps.
class Training {
 public:
  Training(const StepOptions& options, Group world)
      : world_(std::move(world)),
        device_(world_.device()),
        precision_(options.precision),
        task_(options.model == "gpt" ? make_gpt(options) : make_resnet(options)) {
    if (options.batch % world_.size() != 0)
      throw lockstep::UsageError("BATCH is " + std::to_string(options.batch) + "; expected a multiple of the " +
                                 std::to_string(world_.size()) + " ranks");
    const std::int64_t own = options.batch / world_.size();
    task_.input = task_.input.narrow(0, own * world_.rank(), own).to(device_);
    task_.target = task_.target.narrow(0, own * world_.rank(), own).to(device_);
    task_.net->to(device_);
    if (world_.size() > 1 && options.model == "resnet50")
      lockstep::convert_sync_batch_norm(*task_.net, world_);  // statistics of all ranks' images, as on one rank
    ddp_ = std::make_unique<lockstep::DistributedDataParallel>(*task_.net, world_);
    optimizer_ = make_optimizer(options, *task_.net, *ddp_);
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

  /// Returns the memory of the device's allocator; on the CPU, that of this process.
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

json measure_steps(Training& training, std::int64_t warm_up, std::int64_t measured) {
  std::vector<at::Tensor> losses;
  for (std::int64_t i = 0; i < warm_up; ++i) losses.push_back(training.step());
  training.synchronize();
  const auto begin = std::chrono::steady_clock::now();
  for (std::int64_t i = 0; i < measured; ++i) losses.push_back(training.step());
  training.synchronize();
  const double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  json result = training.memory();
  result["ms"] = ms / static_cast<double>(std::max<std::int64_t>(measured, 1));
  for (const at::Tensor& loss : losses) result["losses"].push_back(loss.item<double>());
  return result;
}

void print_json(const json& line) { std::cout << line.dump() << std::endl; }

void run(const StepOptions& options) {
  at::set_num_threads(static_cast<int>(options.threads));
  Group world = lockstep::init({.device = options.device});
  Training training(options, world);
  if (options.steps > 0) {
    std::vector<double> losses = measure_steps(training, options.steps, 0)["losses"];
    const at::Tensor means = torch::tensor(losses, torch::kDouble);
    world.all_reduce(means, lockstep::ReduceOp::kMean);
    losses.assign(means.data_ptr<double>(), means.data_ptr<double>() + means.numel());
    if (world.rank() == 0) print_json({{"losses", losses}, {"ranks", world.size()}, {"transport", world.transport()}});
    return;
  }
  print_json(training.about());
  for (std::int64_t warm_up = 0, measured = 0; std::cin >> warm_up >> measured;)
    print_json(measure_steps(training, warm_up, measured));
}

/// Returns the first line of a message of torch, without its stack trace.
std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

int main(int argc, char** argv) try { run(parse_arguments(argc, argv)); } catch (const lockstep::Error& error) {
  print_json({{"refused", error.what()}});
  return lockstep::base::exit_code(error.cause());
} catch (const std::bad_alloc&) {
  print_json({{"out_of_memory", "std::bad_alloc"}});
} catch (const c10::Error& error) {
  const std::string text = error.what_without_backtrace();
  const bool out_of_memory =
      dynamic_cast<const c10::OutOfMemoryError*>(&error) || text.find("can't allocate memory") != std::string::npos;
  print_json({{out_of_memory ? "out_of_memory" : "refused", first_line(text)}});
  return out_of_memory ? 0 : 1;
}
