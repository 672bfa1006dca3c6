#include "tests/training/programs/program.h"

#include <fstream>
#include <stdexcept>
#include <utility>

namespace lockstep::tests::programs {
namespace {

std::string bytes_of(const torch::Tensor& tensor) {
  const torch::Tensor contiguous = tensor.detach().contiguous();
  return {static_cast<const char*>(contiguous.const_data_ptr()), contiguous.nbytes()};
}

std::vector<double> numbers_of(torch::Tensor tensor) {
  tensor = tensor.detach();
  if (tensor.is_complex()) tensor = torch::view_as_real(tensor.resolve_conj());
  tensor = tensor.to(torch::kFloat64).contiguous().view({-1});
  return {tensor.const_data_ptr<double>(), tensor.const_data_ptr<double>() + tensor.numel()};
}

}  // namespace

double Run::add_loss(const torch::Tensor& loss, const std::string& name) {
  const torch::Tensor mean = loss.detach().to(torch::kFloat64).clone();
  world.all_reduce(mean, ReduceOp::kMean);
  add(name, mean.item<double>());
  return mean.item<double>();
}

void Run::add(const std::string& name, double value) { results_[name].push_back(value); }

void Run::add(const std::string& name, const torch::Tensor& values) { add(name, values, world); }

void Run::add(const std::string& name, const torch::Tensor& values, const Group& group) {
  const std::vector<std::string> bytes = group.all_gather_bytes(bytes_of(values));
  for (std::size_t rank = 1; rank < bytes.size(); ++rank)
    expect(bytes[rank] == bytes[0], name + " has the same bits on ranks 0 and " + std::to_string(rank));
  for (const double number : numbers_of(values)) add(name, number);
}

void Run::add(const std::string& name, const torch::nn::Module& module) { add(name, module, world); }

void Run::add(const std::string& name, const torch::nn::Module& module, const Group& group) {
  for (const auto& item : module.named_parameters()) add(name + "." + item.key(), item.value(), group);
  for (const auto& item : module.named_buffers()) add(name + "." + item.key(), item.value(), group);
}

void Run::write(const std::string& path) const {
  std::ofstream file(path);
  file.precision(17);
  for (const auto& [name, values] : results_) {
    file << name;
    for (const double value : values) file << ' ' << value;
    file << '\n';
  }
  if (!file.flush()) throw std::runtime_error("cannot write " + path);
}

torch::Tensor normal(std::int64_t step, at::IntArrayRef shape) {
  torch::manual_seed(static_cast<std::uint64_t>(1000 + step));
  return torch::randn(shape, torch::kFloat64);
}

torch::Tensor uniform(std::int64_t step, at::IntArrayRef shape) {
  torch::manual_seed(static_cast<std::uint64_t>(2000 + step));
  return torch::rand(shape, torch::kFloat64);
}

torch::Tensor integers(std::int64_t step, std::int64_t limit, at::IntArrayRef shape) {
  torch::manual_seed(static_cast<std::uint64_t>(3000 + step));
  return torch::randint(limit, shape, torch::kInt64);
}

std::vector<Program> with_both_optimizers(const std::string& name, void (*train)(Run&), double tolerance) {
  return {{.name = name, .train = train, .tolerance = tolerance},
          {.name = name + "_fused",
           .train = train,
           .tolerance = tolerance,
           .optimizers = Optimizers::kFused,
           .reference = name}};
}

std::vector<Program> with_all_optimizers(const std::string& name, void (*train)(Run&), double tolerance) {
  std::vector<Program> programs = with_both_optimizers(name, train, tolerance);
  for (const auto& [suffix, kind] :
       {std::pair("_sharded", Optimizers::kSharded), std::pair("_foreach", Optimizers::kForeach),
        std::pair("_in_backward", Optimizers::kInBackward)})
    programs.push_back(
        {.name = name + suffix, .train = train, .tolerance = tolerance, .optimizers = kind, .reference = name});
  return programs;
}

namespace {

template <typename Optimizer, typename Options>
std::unique_ptr<torch::optim::Optimizer> make_fused(const Run& run, const DistributedDataParallel& ddp,
                                                    const Options& options) {
  auto optimizer =
      std::make_unique<Optimizer>(ddp, options, std::vector<typename Optimizer::Group>{},
                                  optim::FusedOptions{.shard_state = run.optimizers == Optimizers::kSharded,
                                                      .foreach = run.optimizers == Optimizers::kForeach});
  if (run.optimizers == Optimizers::kInBackward) optimizer->update_in_backward();
  return optimizer;
}

}  // namespace

std::unique_ptr<torch::optim::Optimizer> make_sgd(const Run& run, const DistributedDataParallel& ddp,
                                                  const std::vector<torch::Tensor>& parameters, double lr,
                                                  double momentum) {
  if (run.fused) return make_fused<optim::SGD>(run, ddp, optim::SGDOptions{.lr = lr, .momentum = momentum});
  return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(lr).momentum(momentum));
}

std::unique_ptr<torch::optim::Optimizer> make_adam(const Run& run, const DistributedDataParallel& ddp,
                                                   const std::vector<torch::Tensor>& parameters, double lr,
                                                   std::array<double, 2> betas) {
  if (run.fused) return make_fused<optim::Adam>(run, ddp, optim::AdamOptions{.lr = lr, .betas = betas});
  return std::make_unique<torch::optim::Adam>(parameters, torch::optim::AdamOptions(lr).betas({betas[0], betas[1]}));
}

void expect(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error("expected: " + what);
}

std::string usage_error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const UsageError& error) {
    return error.what();
  }
  throw std::runtime_error("expected a UsageError, but nothing was thrown");
}

}  // namespace lockstep::tests::programs
