// The programs of training_programs: small trainings as users write them, whose results do not depend on the number of
// ranks. Each uses the public API only, and splits the same global batches between its ranks.
#pragma once

#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace lockstep::tests::programs {

constexpr int kSteps = 10;
constexpr std::int64_t kGlobalBatch = 12;  // divides by 1, 2 and 3

/// The optimizers that a program makes.
enum class Optimizers {
  kTorch,       ///< those of torch
  kFused,       ///< those of lockstep::optim
  kSharded,     ///< the same with FusedOptions.shard_state
  kForeach,     ///< the same with FusedOptions.foreach
  kInBackward,  ///< the same, which update parameters in backward()
};

/// One run of a program: its ranks, its folder and its results.
class Run {
 public:
  Run(Group ranks, std::string directory, Optimizers kind)
      : world(std::move(ranks)), folder(std::move(directory)), optimizers(kind), fused(kind != Optimizers::kTorch) {}

  const Group world;
  const std::string folder;  ///< an empty directory that all ranks see
  const Optimizers optimizers;
  const bool fused;  ///< they are those of lockstep::optim

  /// Returns this rank's part of a global batch: consecutive samples, equally many on each rank.
  torch::Tensor part(const torch::Tensor& batch, std::int64_t dim = 0) const {
    return batch.chunk(world.size(), dim)[static_cast<std::size_t>(world.rank())].contiguous();
  }

  /// Adds the mean of this rank's `loss` over all ranks to the results. Collective.
  double add_loss(const torch::Tensor& loss, const std::string& name = "loss");
  /// Adds a value that is equal on all ranks.
  void add(const std::string& name, double value);
  /// Adds a tensor that is equal on all ranks: compares its bits with those of the other ranks, and throws if they
  /// differ. Collective of `group`, or of all ranks.
  void add(const std::string& name, const torch::Tensor& values);
  void add(const std::string& name, const torch::Tensor& values, const Group& group);
  /// Adds all parameters and buffers of a module. Collective.
  void add(const std::string& name, const torch::nn::Module& module);
  void add(const std::string& name, const torch::nn::Module& module, const Group& group);

  /// Writes the results: a line per name, with its values.
  void write(const std::string& path) const;

 private:
  std::map<std::string, std::vector<double>> results_;
};

/// A program and how its results are compared.
struct Program {
  std::string name;
  void (*train)(Run&);
  double tolerance = 1e-9;  ///< largest difference from one rank, relative to values above 1
  Optimizers optimizers = Optimizers::kTorch;
  std::string reference = {};  ///< the program whose results these must equal; empty: its own on one rank
  std::string warning = {};    ///< text of a warning that a run on several ranks must print
  bool must_differ = false;    ///< several ranks must not equal one: shows that the comparison detects an error
};

// The programs by topic.
std::vector<Program> supervised_programs();
std::vector<Program> generative_programs();
std::vector<Program> sequence_programs();
std::vector<Program> autograd_programs();
std::vector<Program> parameter_programs();
std::vector<Program> module_programs();
std::vector<Program> precision_programs();
std::vector<Program> process_programs();
std::vector<Program> resuming_programs();
std::vector<Program> update_programs();

/// Returns `name` with torch's optimizers, and `name`_fused, which must have the same results.
std::vector<Program> with_both_optimizers(const std::string& name, void (*train)(Run&), double tolerance = 1e-9);
/// The same with all kinds of optimizers.
std::vector<Program> with_all_optimizers(const std::string& name, void (*train)(Run&), double tolerance = 1e-9);

// Random numbers that are equal on all ranks: a function of the step and the shape.
torch::Tensor normal(std::int64_t step, at::IntArrayRef shape);
torch::Tensor uniform(std::int64_t step, at::IntArrayRef shape);
torch::Tensor integers(std::int64_t step, std::int64_t limit, at::IntArrayRef shape);

/// Makes a module of float64, with other initial values on each rank, which DistributedDataParallel must replace by
/// those of rank 0.
template <typename Module, typename... Arguments>
Module make_module(const Run& run, Arguments&&... arguments) {
  torch::manual_seed(static_cast<std::uint64_t>(1 + run.world.rank()));
  Module module(std::forward<Arguments>(arguments)...);
  module->to(torch::kFloat64);
  return module;
}

/// Makes torch's SGD or Adam over `parameters`, or the fused one over those of `ddp` if the run asks for it.
std::unique_ptr<torch::optim::Optimizer> make_sgd(const Run& run, const DistributedDataParallel& ddp,
                                                  const std::vector<torch::Tensor>& parameters, double lr,
                                                  double momentum = 0);
std::unique_ptr<torch::optim::Optimizer> make_adam(const Run& run, const DistributedDataParallel& ddp,
                                                   const std::vector<torch::Tensor>& parameters, double lr,
                                                   std::array<double, 2> betas = {0.9, 0.999});

/// Throws std::runtime_error unless `condition` is true.
void expect(bool condition, const std::string& what);
/// Calls `action` and returns the text of the UsageError that it must throw.
std::string usage_error_of(const std::function<void()>& action);

}  // namespace lockstep::tests::programs
