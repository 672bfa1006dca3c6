// A training step in C++ with Lockstep, compared with that of pytorch_step.py in Python. Started by proof.py.
//
//   bench_gpu_step IMPL MODEL SIZE DEVICE THREADS [PRECISION BATCH STEPS [TRACE]]
//
// IMPL: lockstep (DistributedDataParallel, torch's optimizer), lockstep-fused (an optimizer of lockstep::optim),
// lockstep-graph (the same, as a CUDA graph), lockstep-nccl (as lockstep-fused, also with one rank over NCCL); MODEL:
// gpt, gpt-short (a text of 128 characters; both with AdamW), resnet50, resnet18 (SGD with momentum); SIZE: full, tiny;
// DEVICE: cpu, cuda (the GPU of this rank).
//
// Reads requests from stdin and prints a line of JSON for each:
//   make PRECISION BATCH   makes the model anew; PRECISION: 32, tf32, bf16-mixed, fp16-mixed; BATCH: samples of all
//                          ranks in a step. Prints parameters, device, libtorch.
//   drop                   forgets the model and gives its memory back
//   run WARM_UP MEASURED   runs so many steps: ms (per measured step), losses (of all steps), peak_bytes and
//                          reserved_bytes since `make`, and synchronizations, how often a measured step waits for the
//                          device (null unless libcount_synchronizations is loaded)
// With STEPS, which also works on several ranks, it runs that many steps and prints their losses as means over the
// ranks; with TRACE, rank 0 writes libtorch's profile of one more step to that file (Chrome's trace format). An error
// is a line of JSON as well: refused (by Lockstep, for this machine or these arguments), out_of_memory, or failed
// (anything else), after which the next request is served.
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <lockstep/base/parse.h>
#include <lockstep/cuda/graphed_step.h>
#include <lockstep/lockstep.h>
#include <sys/resource.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <sstream>
#include <string>

#include "examples/03_gpt/gpt.h"
#include "examples/04_imagenet/resnet.h"

namespace {

using lockstep::Group;
using nlohmann::json;

struct ProgramOptions {
  std::string impl, model;
  bool tiny = false;
  std::string device;
  std::int64_t threads = 1;
};

struct StepOptions {
  lockstep::amp::Precision precision;
  bool tf32 = false;
  std::int64_t batch = 0;
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

ProgramOptions parse_program_options(char** words) {
  return {.impl = one_of("IMPL", words[1], {"lockstep", "lockstep-fused", "lockstep-graph", "lockstep-nccl"}),
          .model = one_of("MODEL", words[2], {"gpt", "gpt-short", "resnet50", "resnet18"}),
          .tiny = one_of("SIZE", words[3], {"full", "tiny"}) == "tiny",
          .device = one_of("DEVICE", words[4], {"cpu", "cuda"}),
          .threads = lockstep::base::parse_int_in_range("THREADS", words[5], 1, 1024)};
}

StepOptions parse_step_options(const std::string& precision, const std::string& batch) {
  one_of("PRECISION", precision, {"32", "tf32", "bf16-mixed", "fp16-mixed"});
  const bool tf32 = precision == "tf32";
  return {.precision = lockstep::amp::parse_precision(tf32 ? "32" : precision),
          .tf32 = tf32,
          .batch = lockstep::base::parse_int_in_range("BATCH", batch, 1, 1 << 24)};
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

bool is_gpt(const ProgramOptions& program) { return program.model.starts_with("gpt"); }

Task make_gpt(const ProgramOptions& program, std::int64_t batch) {
  const GptOptions options =
      program.tiny ? GptOptions{.vocabulary = 101, .block = 16, .width = 32, .layers = 2, .heads = 4}
                   : GptOptions{.vocabulary = 50257, .block = 1024, .width = 768, .layers = 12, .heads = 12};
  Gpt net(options);
  set_weights(*net);
  torch::manual_seed(2);
  const std::int64_t length = program.model == "gpt-short" ? options.block / 8 : options.block;
  const at::Tensor text = torch::randint(options.vocabulary, {batch, length}, torch::kLong);
  const at::Tensor next = torch::randint(options.vocabulary, {batch, length}, torch::kLong);
  return {net.ptr(), text, next,
          [net](const at::Tensor& input, const at::Tensor& target) mutable { return net->loss(input, target); }};
}

/// Makes a ResNet for images of 224 x 224 pixels; tiny: ResNet-18 for 64 x 64.
Task make_resnet(const ProgramOptions& program, std::int64_t batch) {
  const std::int64_t side = program.tiny ? 64 : 224, classes = program.tiny ? 10 : 1000;
  resnet::Net net(resnet::kArchs.at(program.tiny ? "resnet18" : program.model), classes);
  set_weights(*net);
  torch::manual_seed(2);
  const at::Tensor images = torch::randn({batch, 3, side, side});
  const at::Tensor labels = torch::randint(classes, {batch}, torch::kLong);
  return {net.ptr(), images, labels, [net](const at::Tensor& input, const at::Tensor& target) mutable {
            return torch::nn::functional::cross_entropy(net->forward(input), target);
          }};
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const ProgramOptions& program, torch::nn::Module& net,
                                                        lockstep::DistributedDataParallel& ddp) {
  const bool fused = program.impl != "lockstep";
  if (is_gpt(program)) {
    if (fused) return std::make_unique<lockstep::optim::AdamW>(ddp, lockstep::optim::AdamWOptions{.lr = 3e-4});
    return std::make_unique<torch::optim::AdamW>(net.parameters(), torch::optim::AdamWOptions(3e-4));
  }
  if (fused)
    return std::make_unique<lockstep::optim::SGD>(ddp, lockstep::optim::SGDOptions{.lr = 1e-4, .momentum = 0.9});
  return std::make_unique<torch::optim::SGD>(net.parameters(), torch::optim::SGDOptions(1e-4).momentum(0.9));
}

/// Returns how often this process has waited for the device, or nothing if that is not counted.
std::optional<std::uint64_t> count_synchronizations() {
  using Count = std::uint64_t (*)();
  static const auto count = reinterpret_cast<Count>(::dlsym(RTLD_DEFAULT, "count_synchronizations"));
  return count ? std::optional(count()) : std::nullopt;
}

c10::DeviceAllocator* allocator_of(at::Device device) {
  return device.is_cpu() ? nullptr : c10::getDeviceAllocator(device.type());
}

/// Gives unused memory back to the device, and lets memory() count from now on.
void forget_peak(at::Device device) {
  auto* const allocator = allocator_of(device);
  if (!allocator) return;
  at::globalContext().lazyInitDevice(device.type());  // before, the allocator knows no device
  allocator->emptyCache();
  allocator->resetPeakStats(device.index());
}

/// Trains the model on this rank and measures its steps.
class Training {
 public:
  Training(const ProgramOptions& program, const StepOptions& options, Group world)
      : world_(std::move(world)), device_(world_.device()), precision_(options.precision) {
    if (options.batch % world_.size() != 0)
      throw lockstep::UsageError("BATCH is " + std::to_string(options.batch) + "; expected a multiple of the " +
                                 std::to_string(world_.size()) + " ranks");
    at::globalContext().setAllowTF32CuBLAS(options.tf32);
    at::globalContext().setAllowTF32CuDNN(options.tf32);
    forget_peak(device_);
    task_ = is_gpt(program) ? make_gpt(program, options.batch) : make_resnet(program, options.batch);
    const std::int64_t own = options.batch / world_.size();
    task_.input = task_.input.narrow(0, own * world_.rank(), own).to(device_);
    task_.target = task_.target.narrow(0, own * world_.rank(), own).to(device_);
    task_.net->to(device_);
    if (world_.size() > 1 && !is_gpt(program))
      lockstep::convert_sync_batch_norm(*task_.net, world_);  // statistics of all ranks' images, as on one rank
    ddp_ = std::make_unique<lockstep::DistributedDataParallel>(*task_.net, world_);
    optimizer_ = make_optimizer(program, *task_.net, *ddp_);
    scaler_ = std::make_unique<lockstep::GradScaler>(
        lockstep::amp::GradScalerOptions{.init_scale = 1024, .enabled = precision_.loss_scaling});
    if (program.impl == "lockstep-graph")
      graph_ = std::make_unique<lockstep::cuda::GraphedStep>(device_, [this](const std::vector<at::Tensor>& batch) {
        return std::vector<at::Tensor>{run_step(batch[0], batch[1])};
      });
  }

  at::Tensor step() {
    // A graph writes its next loss to the same memory.
    return graph_ ? (*graph_)({task_.input, task_.target})[0].clone() : run_step(task_.input, task_.target);
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
    const auto stats = allocator_of(device_)->getDeviceStats(device_.index());
    constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return {{"peak_bytes", stats.allocated_bytes[kAll].peak}, {"reserved_bytes", stats.reserved_bytes[kAll].peak}};
  }

 private:
  at::Tensor run_step(const at::Tensor& input, const at::Tensor& target) {
    optimizer_->zero_grad();
    at::Tensor loss;
    {
      const lockstep::Autocast autocast(
          {.device = device_.type(), .dtype = precision_.autocast, .enabled = precision_.autocast.has_value()});
      loss = task_.loss(input, target);
    }
    scaler_->scale(loss).backward();
    scaler_->step(*optimizer_);
    scaler_->update();
    return loss.detach();
  }

  Group world_;
  const at::Device device_;
  const lockstep::amp::Precision precision_;
  Task task_;
  std::unique_ptr<lockstep::DistributedDataParallel> ddp_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::unique_ptr<lockstep::GradScaler> scaler_;
  std::unique_ptr<lockstep::cuda::GraphedStep> graph_;  // null: steps run eagerly
};

json measure_steps(Training& training, std::int64_t warm_up, std::int64_t measured) {
  std::vector<at::Tensor> losses;
  for (std::int64_t i = 0; i < warm_up; ++i) losses.push_back(training.step());
  training.synchronize();
  const auto begin = std::chrono::steady_clock::now();
  const auto waited = count_synchronizations();
  for (std::int64_t i = 0; i < measured; ++i) losses.push_back(training.step());
  const auto waits = count_synchronizations();
  training.synchronize();
  const double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  const auto steps = static_cast<double>(std::max<std::int64_t>(measured, 1));
  json result = training.memory();
  result["ms"] = ms / steps;
  result["synchronizations"] = waits ? json(static_cast<double>(*waits - *waited) / steps) : json();
  for (const at::Tensor& loss : losses) result["losses"].push_back(loss.item<double>());
  return result;
}

void print_json(const json& line) { std::cout << line.dump() << std::endl; }

/// Returns the first line of a message of torch, without its stack trace.
std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

/// Calls `function`. Returns true, or prints the error and returns false.
bool succeeds(const std::function<void()>& function) {
  try {
    function();
    return true;
  } catch (const lockstep::Error& error) {
    print_json({{"refused", error.what()}});
  } catch (const std::bad_alloc&) {
    print_json({{"out_of_memory", "std::bad_alloc"}});
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    const bool out_of_memory =
        dynamic_cast<const c10::OutOfMemoryError*>(&error) || text.find("can't allocate memory") != std::string::npos;
    print_json({{out_of_memory ? "out_of_memory" : "failed", first_line(text)}});
  } catch (const std::exception& error) {
    print_json({{"failed", first_line(error.what())}});
  }
  return false;
}

/// Serves one request. An error leaves no training, so that its memory is free for the next.
void serve(const ProgramOptions& program, const Group& world, std::unique_ptr<Training>& training,
           std::istringstream request) {
  std::string what, first, second;
  request >> what >> first >> second;
  const bool good = succeeds([&] {
    one_of("the request", what, {"make", "drop", "run"});
    if (what == "drop") {
      training.reset();
      forget_peak(world.device());
      return print_json(json::object());
    }
    if (what == "make") {
      training.reset();
      training = std::make_unique<Training>(program, parse_step_options(first, second), world);
      return print_json(training->about());
    }
    if (!training) throw lockstep::UsageError("run: there is no training; expected make before it");
    print_json(measure_steps(*training, lockstep::base::parse_int_in_range("WARM_UP", first, 0, 1000000),
                             lockstep::base::parse_int_in_range("MEASURED", second, 0, 1000000)));
  });
  if (!good) training.reset();
}

/// Runs a step on every rank. Rank 0 writes its operations and the kernels of its GPU to `path`.
void trace_step(Training& training, const Group& world, const std::string& path) {
  namespace profiler = torch::autograd::profiler;
  if (world.rank() != 0) {
    training.step();
    return training.synchronize();
  }
  const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
  std::set<torch::profiler::impl::ActivityType> activities{torch::profiler::impl::ActivityType::CPU};
  if (!world.device().is_cpu()) activities.insert(torch::profiler::impl::ActivityType::CUDA);
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities, {at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION});
  training.step();
  training.synchronize();
  profiler::disableProfiler()->save(path);
}

/// Runs `steps` steps on every rank, prints the means of their losses, and traces one more step if `trace` is a path.
void run_steps(const ProgramOptions& program, Group& world, const StepOptions& options, std::int64_t steps,
               const std::string& trace) {
  Training training(program, options, world);
  std::vector<double> losses = measure_steps(training, steps, 0)["losses"];
  const at::Tensor means = torch::tensor(losses, torch::kDouble);
  world.all_reduce(means, lockstep::ReduceOp::kMean);
  losses.assign(means.data_ptr<double>(), means.data_ptr<double>() + means.numel());
  if (world.rank() == 0) print_json({{"losses", losses}, {"ranks", world.size()}, {"transport", world.transport()}});
  if (!trace.empty()) trace_step(training, world, trace);
}

void run(int count, char** words) {
  if (count != 6 && count != 9 && count != 10)
    throw lockstep::UsageError("usage: bench_gpu_step IMPL MODEL SIZE DEVICE THREADS [PRECISION BATCH STEPS [TRACE]]");
  const ProgramOptions program = parse_program_options(words);
  at::set_num_threads(static_cast<int>(program.threads));
  Group world = program.impl == "lockstep-nccl" ? lockstep::init({.transport = "nccl", .device = program.device})
                                                : lockstep::init({.device = program.device});
  if (count > 6)
    return run_steps(program, world, parse_step_options(words[6], words[7]),
                     lockstep::base::parse_int_in_range("STEPS", words[8], 1, 1000000), count > 9 ? words[9] : "");
  std::unique_ptr<Training> training;
  for (std::string line; std::getline(std::cin, line);) serve(program, world, training, std::istringstream(line));
}

}  // namespace

int main(int argc, char** argv) {
  int code = 1;
  const auto run_all = [&] {
    try {
      run(argc, argv);
    } catch (const lockstep::Error& error) {
      code = lockstep::base::exit_code(error.cause());
      throw;
    }
  };
  return succeeds(run_all) ? 0 : code;
}
