// A rank that forks children in the middle of a training, as programs do that start tools or other workers.
//   fork_probe KIND COUNT
// Each child ends at once:
//
//   return   returns from main(), through the destructors of everything that the rank has
//   exec     the same after an exec that fails
//   throw    an exception under lockstep::main()
//   bare     an uncaught exception, which ends in std::terminate()
//   exit     exit(3)
//   crash    a segmentation fault, without a core dump
//   calls    collectives and a step, each of which must be refused, and returns
//   signals  waits; the rank, which uses stop_requested(), ends it with SIGTERM, SIGUSR1 or SIGINT
//   values   returns if parameters and state are those of the fork although the rank has made another step
//
// The rank checks how the child has ended, trains on, and exits with 0.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/checkpoint/stateful.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/uncaught_exception.h"
#include "lockstep/data/loader.h"
#include "lockstep/ddp/ddp.h"
#include "lockstep/optim/sgd.h"

namespace {

constexpr int kReturned = 5, kExited = 3;

/// How a child of this kind must end, as wait() reports it.
bool ended_as_expected(const std::string& kind, int status) {
  const auto exited = [&](int code) { return WIFEXITED(status) && WEXITSTATUS(status) == code; };
  const auto killed = [&](int signal) { return WIFSIGNALED(status) && WTERMSIG(status) == signal; };
  if (kind == "return" || kind == "exec" || kind == "calls" || kind == "values") return exited(kReturned);
  if (kind == "throw") return exited(1);
  if (kind == "bare") return killed(SIGABRT);
  if (kind == "exit") return exited(kExited);
  return kind == "crash" ? killed(SIGSEGV) : killed(SIGTERM) || killed(SIGUSR1) || killed(SIGINT);
}

[[noreturn]] void end_uncaught() {
  std::thread([] { throw std::runtime_error("of the child"); }).join();
  std::abort();
}

bool refuses_calls(lockstep::comm::Group& world, torch::nn::Linear& net, lockstep::optim::SGD& optimizer) {
  const auto is_refused = [](const auto& call) {
    try {
      call();
      return false;
    } catch (const lockstep::base::UsageError&) {
      return true;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "refused otherwise: %s\n", error.what());
      return false;
    }
  };
  const torch::Tensor one = torch::ones({1});
  return is_refused([&] { world.all_reduce(one); }) && is_refused([&] { world.all_reduce_async(one); }) &&
         is_refused([&] { world.barrier(); }) && is_refused([&] {
           net->forward(torch::ones({1, 8})).sum().backward();
           optimizer.step();
         });
}

/// The sums of parameters, state and gradients.
std::vector<double> values(torch::nn::Linear& net, lockstep::optim::SGD& optimizer) {
  std::vector<double> sums = {net->weight.sum().item<double>(), net->weight.grad().sum().item<double>()};
  const auto state = optimizer.state_dict();
  sums.push_back(lockstep::checkpoint::value_of<torch::Tensor>(state, "weight.momentum_buffer").sum().item<double>());
  return sums;
}

void train(torch::nn::Linear& net, const torch::Tensor& batch, lockstep::optim::SGD& optimizer) {
  optimizer.zero_grad();
  net->forward(batch).pow(2).mean().backward();
  optimizer.step();
}

/// Forks a child that calls values() after the rank has made a step. Returns whether they are those of the fork.
bool child_has_values_of_fork(const std::function<void()>& step, const std::function<std::vector<double>()>& values) {
  int ends[2];
  if (::pipe(ends) != 0) throw std::runtime_error("no pipe");
  const std::vector<double> before = values();
  const pid_t pid = ::fork();
  ::close(ends[pid == 0 ? 1 : 0]);
  if (pid == 0) {
    char unused = 0;
    const bool is_after_step = ::read(ends[0], &unused, 1) == 0;  // the rank has closed its end
    ::_exit(is_after_step && values() == before ? kReturned : 6);
  }
  step();
  ::close(ends[1]);
  int status = 0;
  ::waitpid(pid, &status, 0);
  return values() != before && WIFEXITED(status) && WEXITSTATUS(status) == kReturned;
}

/// Returns the child's result of main().
int child(const std::string& kind, lockstep::comm::Group& world, torch::nn::Linear& net,
          lockstep::optim::SGD& optimizer) {
  if (kind == "calls") return refuses_calls(world, net, optimizer) ? kReturned : 6;
  const torch::NoGradGuard no_grad;
  if (!std::isfinite(net->forward(torch::ones({1, 8})).sum().item<float>())) return 7;  // reads shared parameters
  net->weight.fill_(std::nanf(""));                                                     // in its own copy
  if (kind == "exec") ::execl("/no/such/program", "program", nullptr);
  if (kind == "throw") throw std::runtime_error("of the child");
  if (kind == "bare") end_uncaught();
  if (kind == "exit") std::exit(kExited);
  if (kind == "signals")
    for (;;) ::pause();
  if (kind == "crash") ::prctl(PR_SET_DUMPABLE, 0), ::signal(SIGSEGV, SIG_DFL), ::raise(SIGSEGV);
  return kReturned;
}

int run(int argc, char** argv) {
  if (argc != 3) throw std::invalid_argument("usage: fork_probe KIND COUNT");
  const std::string kind = argv[1];
  const int count = std::atoi(argv[2]);
  lockstep::comm::Group world = lockstep::comm::init();
  torch::manual_seed(1);
  torch::nn::Linear net(8, 4);
  lockstep::ddp::DistributedDataParallel ddp(net, world);
  lockstep::optim::SGD optimizer(ddp, {.lr = 0.01, .momentum = 0.9});
  auto loader = lockstep::data::make_loader(
      1000000, [](std::size_t index) { return torch::full({8}, static_cast<double>(index % 7)); }, world,
      {.batch_size = 2, .num_workers = 2});
  const std::string folder = "checkpoints";
  lockstep::checkpoint::Checkpointer checkpoints(world, folder);
  lockstep::comm::Work work = world.barrier_async();
  work.wait();
  int step = 0;
  if (kind == "signals") world.stop_requested();
  for (auto& batch : loader.epoch(0)) {
    train(net, batch, optimizer);
    if (kind == "values") {
      const bool good =
          child_has_values_of_fork([&] { train(net, batch, optimizer); }, [&] { return values(net, optimizer); });
      if (!good) return 9;
      if (++step == count) break;
      continue;
    }
    checkpoints.save_async(step, {{"net", {{"weight", net->weight.detach()}}}});
    const pid_t pid = ::fork();
    if (pid == 0) return child(kind, world, net, optimizer);
    if (kind == "signals") ::kill(pid, std::array{SIGTERM, SIGUSR1, SIGINT}[static_cast<std::size_t>(step) % 3]);
    int status = 0;
    ::waitpid(pid, &status, 0);
    if (!ended_as_expected(kind, status)) {
      std::fprintf(stderr, "the child %s ended with status %d\n", kind.c_str(), status);
      return 9;
    }
    if (++step == count) break;
  }
  checkpoints.wait();
  const torch::Tensor sum = torch::ones({1});
  world.all_reduce(sum);
  if (sum.item<float>() != static_cast<float>(world.size()) || !net->weight.isfinite().all().item<bool>()) return 8;
  std::printf("%d children, %lld steps\n", step, static_cast<long long>(world.steps()));
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return lockstep::comm::main(argc, argv, run); }
