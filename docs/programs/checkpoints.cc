// The program of docs/guide/06-checkpoints.md: a training that is stopped and resumed, and files for Python.
//   lockstep run -n 2 docs_checkpoints
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <limits>

#include "docs/programs/small_training.h"

namespace {

namespace checkpoint = lockstep::checkpoint;

/// Creates a new folder on rank 0. Returns its name on all ranks.
std::string new_folder(const lockstep::Group& world) {
  char name[] = "/tmp/docs-checkpoints-XXXXXX";
  return world.broadcast_bytes(world.rank() == 0 ? ::mkdtemp(name) : "", 0);
}

// docs: begin loop
torch::Tensor train(const lockstep::Group& world, const std::string& folder, int steps) {
  auto net = make_net();
  lockstep::TrainingState state(world, folder, {.settings = {{"lr", 1e-2}}});
  lockstep::DistributedDataParallel ddp(*net, world, {.bucket_layout = state.bucket_layout("ddp")});
  lockstep::optim::AdamW optimizer(ddp, {.lr = 1e-2});
  double best = std::numeric_limits<double>::infinity();
  state.add("model", net).add("ddp", ddp).add("optimizer", optimizer).add("best", best);
  state.add_random_state();
  state.resume();
  for (std::int64_t step = state.step(); step < steps;) {
    optimizer.zero_grad();
    const torch::Tensor loss = net->forward(batch(world, static_cast<int>(step))).pow(2).mean();
    loss.backward();
    optimizer.step();
    torch::Tensor mean_loss = loss.detach().clone();
    world.all_reduce(mean_loss, lockstep::ReduceOp::kMean);
    best = std::min(best, mean_loss.item<double>());
    if (++step % 5 == 0) state.save_async(step);  // copies the state; a thread writes it
  }
  state.wait();
  return torch::nn::utils::parameters_to_vector(net->parameters()).detach().clone();
}
// docs: end loop

// docs: begin parts
/// Writes the parts of this rank: here rank 0 those that are equal on all ranks, and each rank its own.
void save_parts(lockstep::Group& world, checkpoint::Checkpointer& checkpoints, std::int64_t step,
                torch::nn::Sequential& net) {
  checkpoint::CheckpointParts parts = {{"seed", {{"seed", step + world.rank()}}}};  // differs on each rank
  if (world.rank() == 0)
    for (const auto& item : net->named_parameters()) parts["model"][item.key()] = item.value().detach();
  checkpoints.save(step, parts);
}
// docs: end parts

void interchange(const std::string& folder) {
  auto net = make_net();
  // docs: begin torch
  lockstep::save(net, folder + "/net.pt");  // torch.load("net.pt", weights_only=True) in Python
  lockstep::load(net, folder + "/net.pt");  // also reads torch.save(net.state_dict(), ...) of Python
  const checkpoint::Value tree = checkpoint::load_torch_file(folder + "/net.pt");
  for (const auto& item : tree.as<checkpoint::Dict>()->items)
    expect(item.key.as<std::string>() && item.value.as<at::Tensor>(), "names and tensors");
  // docs: end torch
  // docs: begin verify
  lockstep::save(net, folder + "/net.safetensors");
  lockstep::load(net, folder + "/net.safetensors", {.verify = false});  // without verifying its hashes
  // docs: end verify
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));
  net->forward(torch::ones({1, 8})).sum().backward();
  optimizer.step();
  // docs: begin optimizer
  const auto state =
      checkpoint::optimizer_state_dict(optimizer, *net);  // "0.weight.exp_avg", "0.weight.step", "group.0.lr" ...
  checkpoint::load_optimizer_state_dict(optimizer, *net, state);
  checkpoint::save_torch_file(checkpoint::python_optimizer_state(optimizer),
                              folder + "/optimizer.pt");  // optimizer.load_state_dict(torch.load(...)) in Python
  checkpoint::load_python_optimizer_state(optimizer, checkpoint::load_torch_file(folder + "/optimizer.pt"));
  // docs: end optimizer
  expect(state.contains("0.weight.exp_avg") && state.contains("group.0.lr"), "the names of an optimizer state");
}

}  // namespace

int run_rank(int, char**) {
  lockstep::Group world = lockstep::init();
  const std::string uninterrupted = new_folder(world), resumed = new_folder(world), parts = new_folder(world);
  const torch::Tensor expected = train(world, uninterrupted, 20);
  train(world, resumed, 12);  // the newest checkpoint is that of step 10
  expect(train(world, resumed, 20).equal(expected), "a resumed training equals an uninterrupted one");
  auto net = make_net();
  checkpoint::Checkpointer checkpoints(world, parts);
  save_parts(world, checkpoints, 7, net);
  const int last = world.size() - 1;
  expect(checkpoint::value_of<std::int64_t>(checkpoints.latest()->read("seed", last), "seed") == 7 + last,
         "any rank reads the parts of any rank");
  if (world.rank() == 0) interchange(uninterrupted);
  world.barrier();
  if (world.rank() == 0) {
    std::filesystem::remove_all(uninterrupted);
    std::filesystem::remove_all(resumed);
    std::filesystem::remove_all(parts);
  }
  return 0;
}

int main(int argc, char** argv) { return lockstep::main(argc, argv, run_rank); }
