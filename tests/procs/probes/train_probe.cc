// A rank that trains a small model, in one of several ways.
//   train_probe until_stop         until all ranks are asked to stop
//   train_probe slow RANK          200 steps, which are slower on RANK
//   train_probe checked            200 steps, with all checks
//   train_probe print STEPS LINES  trains for STEPS; each rank prints LINES numbered lines of 100 bytes in each step
//   train_probe leave_early        rank 0 leaves; the others still use the store for some time
//   train_probe join               until all ranks are asked to stop; rank 1 has few batches and then calls join()
//   train_probe evaluate SECONDS   30 steps; in the middle, rank 0 evaluates for SECONDS
//   train_probe chaos FOLDER STEPS [FAULT RANK STEP]
//                                  writes its history to FOLDER/rank.N.jsonl, for chaos.py. In STEP, RANK has FAULT:
//                                  deadlock, late (3 s), or a wrong call: skip, extra, order, shape, dtype, kind or
//                                  name. heavy is not a fault: from STEP on, all ranks reduce 16 MiB per step
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <string>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/uncaught_exception.h"
#include "lockstep/data/loader.h"
#include "lockstep/ddp/ddp.h"

namespace {

using lockstep::comm::Group;
using lockstep::ddp::DistributedDataParallel;

int train(const std::string& how, int slow) {
  Group world = lockstep::comm::init();
  torch::nn::Linear net(8, 8);
  DistributedDataParallel ddp(net, world, {.compare_replicas_every = 10, .check_finite = true});
  torch::optim::SGD optimizer(net->parameters(), 0.01);
  const bool until_stop = how == "until_stop";
  if (until_stop) world.stop_requested();  // from here on signals are stop requests
  std::printf("rank %d pid %d\n", world.rank(), static_cast<int>(::getpid()));
  std::fflush(stdout);
  const int steps = until_stop ? 100000 : 200;
  for (int step = 0; step < steps; ++step) {
    std::this_thread::sleep_for(std::chrono::milliseconds(world.rank() == slow ? 40 : 5));
    optimizer.zero_grad();
    net->forward(torch::ones({4, 8}) * (world.rank() + 1)).sum().backward();
    optimizer.step();
    if (until_stop && world.stop_requested()) {
      std::printf("left after step %d with %.9g\n", step, net->weight.sum().item<double>());
      return lockstep::comm::kPreemptedExitCode;
    }
  }
  return 0;
}

int print_much(int steps, int lines) {
  Group world = lockstep::comm::init();
  torch::nn::Linear net(8, 8);
  DistributedDataParallel ddp(net, world);
  int number = 0;
  for (int step = 0; step < steps; ++step) {
    net->forward(torch::ones({4, 8})).sum().backward();
    for (int line = 0; line < lines; ++line) std::printf("rank %d line %08d %075d\n", world.rank(), number++, 0);
    if (world.stop_requested()) return lockstep::comm::kPreemptedExitCode;
  }
  return 0;
}

int leave_early() {
  Group world = lockstep::comm::init();
  Group others = world.split(world.rank() == 0 ? 0 : 1);
  if (world.rank() == 0) return 0;
  // The other ranks wait long enough to query the store.
  if (others.rank() == 0) std::this_thread::sleep_for(std::chrono::seconds(2));
  others.all_reduce(torch::ones({4}));
  others.split(0).barrier();  // a new group connects through the store
  std::puts("done");
  return 0;
}

std::uint64_t fnv(const std::vector<at::Tensor>& tensors) {
  std::uint64_t hash = 14695981039346656037u;
  for (const at::Tensor& tensor : tensors) {
    const auto* bytes = static_cast<const unsigned char*>(tensor.const_data_ptr());
    for (std::size_t i = 0; i < tensor.nbytes(); ++i) hash = (hash ^ bytes[i]) * 1099511628211u;
  }
  return hash;
}

int train_with_join() {
  Group world = lockstep::comm::init();
  torch::manual_seed(1);
  torch::nn::Linear net(8, 8);
  DistributedDataParallel ddp(net, world);
  torch::optim::SGD optimizer(net->parameters(), 0.01);
  world.stop_requested();  // from here on signals are stop requests
  lockstep::ddp::join(ddp, [&] {
    for (int step = 0; world.rank() != 1 || step < 10; ++step) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      optimizer.zero_grad();
      net->forward(torch::ones({4, 8}) * (world.rank() + 1)).sum().backward();
      optimizer.step();
      if (world.stop_requested()) break;
      if (step == 30 && world.rank() == 0) std::puts("rank 0 continues alone");
      std::fflush(stdout);
    }
    if (world.rank() == 1) std::printf("rank 1 joins as pid %d\n", static_cast<int>(::getpid()));
    std::fflush(stdout);
  });
  if (!world.stop_requested()) return 1;
  std::printf("left after join with %.9g\n", net->weight.sum().item<double>());
  return lockstep::comm::kPreemptedExitCode;
}

void evaluate(torch::nn::Linear& net, int seconds) {
  const auto slow_sample = [](std::size_t index) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    return lockstep::data::Example{torch::full({8}, static_cast<double>(index)), torch::tensor(0)};
  };
  const torch::NoGradGuard no_grad;
  auto loader = lockstep::data::make_loader(static_cast<std::uint64_t>(seconds) * 50, slow_sample,
                                            lockstep::data::DataShard{}, {.batch_size = 10});
  for (const auto& batch : loader.epoch(0)) net->forward(batch.data);
}

int train_and_evaluate(int seconds) {
  Group world = lockstep::comm::init();
  torch::manual_seed(1);
  torch::nn::Linear net(8, 8);
  DistributedDataParallel ddp(net, world);
  torch::optim::SGD optimizer(net->parameters(), 0.01);
  for (int step = 0; step < 30; ++step) {
    optimizer.zero_grad();
    net->forward(torch::ones({4, 8}) * (world.rank() + step)).sum().backward();
    optimizer.step();
    if (step == 15 && world.rank() == 0 && seconds > 0) evaluate(net, seconds);
  }
  std::printf("hash %016llx\n", static_cast<unsigned long long>(fnv(net->parameters())));
  return 0;
}

/// Writes lines to a file. They are in the file even if the process is killed.
class History {
 public:
  History(const std::string& folder, int rank) : file_(folder + "/rank." + std::to_string(rank) + ".jsonl") {}
  void write(const std::string& fields) {
    file_ << "{" << fields << ", \"ns\": " << std::chrono::steady_clock::now().time_since_epoch().count() << "}\n"
          << std::flush;
  }

 private:
  std::ofstream file_;
};

struct Fault {
  std::string kind;
  int rank = -1;
  int step = -1;
};

void self_deadlock() {
  std::timed_mutex mutex;
  mutex.lock();
  while (!mutex.try_lock_for(std::chrono::hours(1))) {
  }
}

/// Reduces a tensor over all ranks, or makes the wrong call of `fault_kind`. Returns the sum; undefined if the call was
/// left out.
at::Tensor vote(const Group& world, int step, const std::string& fault_kind, std::int64_t num_votes) {
  const at::Tensor votes = torch::full({fault_kind == "shape" ? num_votes + 1 : num_votes}, 1 + world.rank() + step,
                                       fault_kind == "dtype" ? at::kDouble : at::kFloat);
  if (fault_kind == "skip" || fault_kind == "order") return {};
  if (fault_kind == "late") std::this_thread::sleep_for(std::chrono::seconds(3));
  if (fault_kind == "extra") world.barrier();
  if (fault_kind == "kind")
    world.broadcast(votes, 0, {.name = "votes"});
  else
    world.all_reduce(votes, lockstep::comm::ReduceOp::kMean, {.name = fault_kind == "name" ? "others" : "votes"});
  return votes;
}

constexpr std::int64_t kVotes = 64;
constexpr std::int64_t kManyVotes = 4 << 20;
constexpr std::uint64_t kBatch = 8;
constexpr std::uint64_t kStepsPerEpoch = 100;

/// Returns a sample that depends only on its index.
lockstep::data::Example sample(std::size_t index) {
  return {torch::sin(torch::arange(1, 33, torch::kFloat) * static_cast<double>(1 + index)),
          torch::tensor(static_cast<std::int64_t>(index))};
}

std::string list(const at::Tensor& numbers) {
  std::string text;
  for (std::int64_t i = 0; i < numbers.numel(); ++i)
    text += (i ? ", " : "") + std::to_string(numbers[i].item<std::int64_t>());
  return "[" + text + "]";
}

/// Trains, and writes the hash of the parameters after each step.
void train_with_fault(const Group& world, History& history, int steps, const Fault& fault) {
  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Linear(32, 64), torch::nn::Tanh(), torch::nn::Linear(64, 8));
  DistributedDataParallel ddp(net, world, {.compare_replicas_every = 50});
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
  auto loader = lockstep::data::make_loader(kBatch * kStepsPerEpoch * static_cast<std::uint64_t>(world.size()), sample,
                                            world, {.batch_size = kBatch, .seed = 3});
  for (int step = 0; step < steps;) {
    const std::uint64_t epoch = static_cast<std::uint64_t>(step) / kStepsPerEpoch;
    for (const auto& batch : loader.epoch(epoch)) {
      const std::string fault_kind = world.rank() == fault.rank && step == fault.step ? fault.kind : "";
      if (fault_kind == "deadlock") self_deadlock();
      std::this_thread::sleep_for(std::chrono::milliseconds(3));
      if (fault_kind == "order")
        world.all_reduce(torch::ones({kVotes}), lockstep::comm::ReduceOp::kMean, {.name = "votes"});
      optimizer.zero_grad();
      net->forward(batch.data).pow(2).mean().backward();
      optimizer.step();
      std::vector<at::Tensor> all{
          vote(world, step, fault_kind, fault.kind == "heavy" && step >= fault.step ? kManyVotes : kVotes)};
      for (const auto& parameter : net->parameters()) all.push_back(parameter);
      if (all[0].defined())
        history.write("\"step\": " + std::to_string(step) + ", \"epoch\": " + std::to_string(epoch) +
                      ", \"samples\": " + list(batch.target) + ", \"hash\": \"" + std::to_string(fnv(all)) + "\"");
      if (++step == steps) break;
    }
  }
}

int chaos(const std::string& folder, int steps, const Fault& fault) {
  Group world = lockstep::comm::init();
  History history(folder, world.rank());
  history.write("\"pid\": " + std::to_string(::getpid()));
  try {
    train_with_fault(world, history, steps, fault);
  } catch (const lockstep::base::CommError& error) {
    std::string text = error.what();
    for (char& c : text)
      if (c == '"' || c == '\\') c = '\'';
    history.write("\"error_cause\": \"" + std::string(name(error.cause())) + "\", \"error_text\": \"" + text + "\"");
    throw;
  }
  history.write("\"done\": true");
  return 0;
}

int run(int argc, char** argv) {
  const std::string how = argc > 1 ? argv[1] : "";
  if (how == "print" && argc > 3) return print_much(std::atoi(argv[2]), std::atoi(argv[3]));
  if (how == "leave_early") return leave_early();
  if (how == "join") return train_with_join();
  if (how == "evaluate") return train_and_evaluate(argc > 2 ? std::atoi(argv[2]) : 0);
  if (how != "chaos") return train(how, argc > 2 ? std::atoi(argv[2]) : -1);
  const Fault fault = argc > 6 ? Fault{argv[4], std::atoi(argv[5]), std::atoi(argv[6])} : Fault{};
  return chaos(argv[2], std::atoi(argv[3]), fault);
}

}  // namespace

int main(int argc, char** argv) { return lockstep::comm::main(argc, argv, run); }
