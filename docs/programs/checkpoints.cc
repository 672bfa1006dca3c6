// The program of docs/guide/06-checkpoints.md: a training that is stopped and resumed, and files for Python.
//   lockstep run -n 2 docs_checkpoints
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <filesystem>

#include "docs/programs/small_training.h"

namespace {

namespace checkpoint = lockstep::checkpoint;

/// Creates a new folder on rank 0. Returns its name on all ranks.
std::string new_folder(const lockstep::Group& world) {
  char name[] = "/tmp/docs-checkpoints-XXXXXX";
  return world.broadcast_bytes(world.rank() == 0 ? ::mkdtemp(name) : "", 0);
}

// docs: begin state
checkpoint::StateDict tensors_of(const torch::nn::Module& module) {
  checkpoint::StateDict state;
  for (const auto& item : module.named_parameters()) state[item.key()] = item.value().detach();
  for (const auto& item : module.named_buffers()) state[item.key()] = item.value();
  return state;
}
// docs: end state

// docs: begin loop
torch::Tensor train(const lockstep::Group& world, const std::string& folder, int steps) {
  auto net = make_net();
  checkpoint::Checkpointer checkpoints(world, folder);
  const auto found = checkpoints.latest();
  if (found) lockstep::load(net, found->path() + "/model.safetensors");
  lockstep::DistributedDataParallel ddp(*net, world);
  lockstep::optim::AdamW optimizer(ddp, {.lr = 1e-2});
  int step = 0;
  if (found) {
    std::vector<std::pair<std::string, torch::Tensor>> state;
    for (const auto& [name, value] : found->read("optimizer")) state.emplace_back(name, std::get<at::Tensor>(value));
    optimizer.load_state_dict(state);
    step = static_cast<int>(checkpoint::value_of<std::int64_t>(found->read("trainer"), "step"));
  }
  for (; step < steps; ++step) {
    optimizer.zero_grad();
    net->forward(batch(world, step)).pow(2).mean().backward();
    optimizer.step();
    if ((step + 1) % 5 != 0) continue;
    checkpoint::CheckpointParts parts = {{"random", {{"seed", std::int64_t{step + 1}}}}};  // differs on each rank
    auto optimizer_state = optimizer.state_dict(false);                                    // collective; without a copy
    if (world.rank() == 0) {
      parts["model"] = tensors_of(*net);
      parts["optimizer"] = {optimizer_state.begin(), optimizer_state.end()};
      parts["trainer"] = {{"step", std::int64_t{step + 1}}};
    }
    checkpoints.save_async(step + 1, parts);  // copies the parts; a thread writes them
  }
  checkpoints.wait();
  return torch::nn::utils::parameters_to_vector(net->parameters()).detach().clone();
}
// docs: end loop

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
  const std::string uninterrupted = new_folder(world), resumed = new_folder(world);
  const torch::Tensor expected = train(world, uninterrupted, 20);
  train(world, resumed, 12);  // the newest checkpoint is that of step 10
  expect(train(world, resumed, 20).equal(expected), "a resumed training equals an uninterrupted one");
  if (world.rank() == 0) interchange(uninterrupted);
  world.barrier();
  if (world.rank() == 0) {
    std::filesystem::remove_all(uninterrupted);
    std::filesystem::remove_all(resumed);
  }
  return 0;
}

int main(int argc, char** argv) { return lockstep::main(argc, argv, run_rank); }
