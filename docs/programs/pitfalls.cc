// The program of docs/guide/04-errors.md: uses that other libraries warn about and that work here, and mistakes that
// are reported in one line.
//   lockstep run -n 2 docs_pitfalls fine         the uses that work
//   lockstep run -n 2 docs_pitfalls desync       one mistake; the page shows the error of each
#include <lockstep/base/env.h>
#include <lockstep/checkpoint/checkpointer.h>
#include <lockstep/checkpoint/safetensors/safetensors.h>
#include <lockstep/comm/group_access.h>
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <thread>

namespace {

using lockstep::DistributedDataParallel;
using lockstep::Group;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    left = register_module("left", torch::nn::Linear(3, 4));
    right = register_module("right", torch::nn::Linear(3, 4));
    norm = register_module("norm", torch::nn::BatchNorm1d(4));
    last = register_module("last", torch::nn::Linear(4, 1));
  }
  torch::Tensor forward(const torch::Tensor& x) { return last(norm(left(x) + right(x))); }
  // docs: begin branch
  torch::Tensor loss_of_one_branch(const torch::Tensor& x, bool go_left) {
    return last(go_left ? left(x) : right(x)).sum();
  }
  // docs: end branch
  torch::nn::Linear left{nullptr}, right{nullptr}, last{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Net);

torch::Tensor make_batch(const Group& world) {
  return torch::full({5, 3}, world.rank() + 1.0) + torch::arange(5).unsqueeze(1);
}

void expect(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error("expected: " + what);
}

void branches(const Group& world) {
  Net net;
  DistributedDataParallel ddp(net, world);
  // docs: begin branches
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    net->loss_of_one_branch(make_batch(world), world.rank() == 0).backward();
  }
  // docs: end branches
  // Each branch was used on one rank: on all ranks its gradient is half of that rank's gradient.
  const torch::Tensor bias = net->last->weight.detach()[0] * 5 / world.size();
  if (world.size() == 2)
    expect(net->left->bias.grad().allclose(bias), "a branch used on one rank has half its gradient");
  if (world.size() == 2) expect(net->right->bias.grad().allclose(bias), "the other branch has half its gradient");
}

void evaluation_on_one_rank(const Group& world) {
  Net net;
  DistributedDataParallel ddp(net, world);
  torch::optim::SGD optimizer(net->parameters(), 0.01);
  // docs: begin evaluation
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    net->forward(make_batch(world)).sum().backward();
    optimizer.step();
    if (world.rank() == 0) {
      const torch::NoGradGuard no_grad;
      net->eval();
      net->forward(make_batch(world));  // does not communicate
      net->train();
    }
  }
  // docs: end evaluation
}

void evaluate(Net& net, const Group& world) {
  const torch::NoGradGuard no_grad;
  net->forward(make_batch(world));
}

void long_work(const Group& world) {
  Net net;
  // docs: begin busy
  if (world.rank() == 0) {
    const auto busy = world.busy("evaluate");  // or call world.alive() from time to time
    evaluate(net, world);
  }
  world.barrier();  // the other ranks wait without a timeout
  // docs: end busy
}

void two_forwards(const Group& world) {
  Net net;
  DistributedDataParallel ddp(net, world);
  // docs: begin forwards
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    const torch::Tensor first = net->forward(make_batch(world));
    const torch::Tensor second = net->forward(2 * make_batch(world));  // BatchNorm's buffers change here
    (first.sum() + second.sum()).backward();
  }
  // docs: end forwards
}

void names(const Group& world) {
  Net net;
  DistributedDataParallel ddp(net, world);
  if (world.rank() != 0) return;
  const std::string file = std::filesystem::temp_directory_path() / ("pitfalls." + std::to_string(::getpid()));
  lockstep::save(net, file);
  const auto saved = lockstep::checkpoint::load_tensors(file);
  std::filesystem::remove(file);
  for (const auto& parameter : net->named_parameters())
    expect(saved.contains(parameter.key()), parameter.key() + " is in the file");
  expect(saved.size() == net->named_parameters().size() + net->named_buffers().size(), "no other name");
}

void optimizer_before(const Group& world) {
  torch::manual_seed(
      world.rank());  // different parameters on each rank; the constructor below broadcasts those of rank 0
  Net net;
  torch::optim::Adam optimizer(net->parameters(), 0.01);
  DistributedDataParallel ddp(net, world);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    net->forward(make_batch(world)).sum().backward();
    optimizer.step();
  }
  const torch::Tensor mine = net->last->weight.detach().clone(), first = mine.clone();
  world.broadcast(first, 0);
  expect(mine.equal(first), "all ranks hold the same bits");
}

void uneven(const Group& world) {
  Net net;
  DistributedDataParallel ddp(net, world);
  // docs: begin join
  lockstep::join(ddp, [&] {
    for (int batch = 0; batch < 3 + world.rank(); ++batch) {
      net->zero_grad();
      net->forward(make_batch(world)).sum().backward();
    }
  });
  // docs: end join
}

void accumulation(const Group& world) {
  Net net;
  DistributedDataParallel ddp(net, world);
  const torch::Tensor x = make_batch(world), y = 2 * x;
  // docs: begin accumulate
  net->zero_grad();
  {
    const auto no_sync_guard = ddp.no_sync();
    net->forward(x).sum().backward();
  }
  net->forward(y).sum().backward();
  // docs: end accumulate
  const torch::Tensor mine = net->last->bias.grad().clone(), first = mine.clone();
  world.broadcast(first, 0);
  expect(mine.equal(first) && mine.item<double>() == 10, "the gradient of both batches on all ranks");
}

void fine(const Group& world) {
  branches(world);
  evaluation_on_one_rank(world);
  long_work(world);
  two_forwards(world);
  names(world);
  optimizer_before(world);
  uneven(world);
  accumulation(world);
  if (world.rank() == 0) std::cout << "all cases work" << std::endl;
}

void block_until_killed() { std::this_thread::sleep_for(std::chrono::seconds(100)); }  // the launcher ends the process

// docs: begin desync
void desync(const Group& world) {
  if (world.rank() == 0) world.all_reduce(torch::ones({3}));  // the mistake
  world.all_reduce(torch::ones({1}));
}
// docs: end desync

void uneven_input(const Group& world) {
  Net net;
  DistributedDataParallel ddp(net, world);
  for (int batch = 0; batch < 3 - world.rank(); ++batch) net->forward(make_batch(world)).sum().backward();
}

void other_model(const Group& world) {
  torch::nn::Linear net(3, 4 + world.rank());
  DistributedDataParallel ddp(net, world);
}

/// As Trainer does with on_disk_error = kStop: the disk error becomes the first cause of the job.
void full_disk(const Group& world) {
  lockstep::checkpoint::Checkpointer checkpoints(world, "checkpoints");
  try {
    checkpoints.save(1, {{"model", {{"weight", torch::zeros({100000})}}}});
  } catch (const lockstep::Error& error) {
    lockstep::comm::GroupAccess::fail(world,
                                      lockstep::CommError(error.cause(), "checkpoint", world.rank(), -1, error.what()));
  }
}

void diverged(const Group& world) {
  Net net;
  DistributedDataParallel ddp(net, world);
  torch::optim::SGD optimizer(net->parameters(), 0.01);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    net->forward(make_batch(world)).sum().backward();
    optimizer.step();
    if (world.rank() == 1) net->last->bias.data().zero_();
  }
}

void stuck(const Group& world) {
  if (world.rank() == 1) block_until_killed();
  world.all_reduce(torch::ones({3}), lockstep::ReduceOp::kSum, {.name = "votes"});
}

void damaged_file(const Group& world) {
  const std::string file = "damaged.safetensors";
  if (world.rank() != 0) return;
  std::ofstream(file) << "this is no safetensors file";
  Net net;
  lockstep::load(net, file);
}

const std::map<std::string, std::function<void(const Group&)>> kCases = {
    {"fine", fine},         {"desync", desync},       {"uneven", uneven_input}, {"other-model", other_model},
    {"diverged", diverged}, {"full-disk", full_disk}, {"stuck", stuck},         {"damaged-file", damaged_file},
};

void run(const std::string& name) {
  if (name == "join-timeout") {
    if (*lockstep::base::Env::this_process().lockstep_rank == "1") block_until_killed();
    lockstep::init({.join_timeout = std::chrono::seconds(1)});
    return;
  }
  const auto found = kCases.find(name);
  if (found == kCases.end()) throw lockstep::UsageError("unknown case \"" + name + "\"");
  std::optional<Group> world = lockstep::init();
  found->second(*world);
  const bool left_early = name == "uneven" && world->rank() == 1;
  world.reset();
  if (left_early) block_until_killed();  // so that the other rank does not detect its exit instead
}

}  // namespace

// docs: begin main
int main(int argc, char** argv) try { run(argc > 1 ? argv[1] : "fine"); } catch (const lockstep::Error& error) {
  std::cerr << "pitfalls: " << error.what() << std::endl;
  return lockstep::base::exit_code(error.cause());
}
// docs: end main
