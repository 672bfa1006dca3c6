// Ranks with different roles, with different numbers of batches, with threads and with children.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <functional>
#include <optional>
#include <thread>

#include "tests/training/programs/program.h"

namespace lockstep::tests::programs::processes {
namespace {

torch::nn::Sequential make_net() {
  torch::nn::Sequential net(torch::nn::Linear(4, 9), torch::nn::Tanh(), torch::nn::Linear(9, 2));
  net->to(torch::kFloat64);
  return net;
}

torch::Tensor loss_of(torch::nn::Sequential& net, const torch::Tensor& x) {
  return torch::mse_loss(net->forward(x), torch::stack({x.sum(1), x.prod(1)}, 1));
}

// While the ranks train one model, a thread of each trains another one, which no other rank knows, and children come
// and go: they read the shared parameters, and end in several ways.

/// Trains a model that belongs to this process alone until `stop` is set.
void train_alone(const torch::Tensor& x, const std::atomic<bool>& stop, std::atomic<int>& steps) {
  torch::nn::Sequential local = make_net();
  torch::optim::Adam optimizer(local->parameters(), 0.01);
  while (!stop) {
    optimizer.zero_grad();
    loss_of(local, x).backward();
    optimizer.step();
    ++steps;
  }
}

/// Starts a child that calls `body`, and returns its wait status.
int run_child(const std::function<void()>& body) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    body();
    ::_exit(9);
  }
  expect(pid > 0, "fork() succeeds");
  int status = 0;
  expect(::waitpid(pid, &status, 0) == pid, "waitpid() returns the child");  // bounded: the driver's time limit
  return status;
}

/// Ends the child without a word on stderr, which the driver would read as an error of the rank.
void throw_silently() {
  ::dup2(::open("/dev/null", O_WRONLY | O_CLOEXEC), STDERR_FILENO);
  try {
    throw std::runtime_error("of the child");
  } catch (...) {
    std::terminate();
  }
}

void expect_children(const torch::nn::Sequential& net, int step) {
  const auto sum = [&] {
    double total = 0;
    for (const torch::Tensor& parameter : net->parameters()) total += parameter.sum().item<double>();
    return total;
  };
  const double before = sum();
  const auto exit_code = [&](const std::function<void()>& body) {
    const int status = run_child(body);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + status;
  };
  switch (step % 5) {
    case 0:
      expect(exit_code([&] { std::exit(sum() == before ? 7 : 8); }) == 7, "a child reads the parameters and exits");
      break;
    case 1:
      expect(exit_code([] { ::execl("/bin/sh", "sh", "-c", "exit 3", nullptr); }) == 3, "a child executes a program");
      break;
    case 2:
      expect(std::system("exit 4") >> 8 == 4, "system() works");  // NOLINT(cert-env33-c)
      break;
    case 3: expect(exit_code(throw_silently) > 1000, "a child ends with an exception"); break;
    case 4:
      expect(exit_code([&] {
               const torch::NoGradGuard no_grad;
               for (const torch::Tensor& parameter : net->parameters()) parameter.zero_();
               ::_exit(sum() == 0 ? 5 : 6);
             }) == 5,
             "a child writes its copy of the parameters");
      break;
  }
  expect(sum() == before, "children do not change the parameters of their parent");
}

void fork_and_threads(Run& run) {
  torch::manual_seed(static_cast<std::uint64_t>(1 + run.world.rank()));
  torch::nn::Sequential net = make_net();
  DistributedDataParallel ddp(net, run.world);
  const auto optimizer = make_sgd(run, ddp, net->parameters(), 0.1, 0.9);
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor x = run.part(normal(step, {kGlobalBatch, 4}));
    std::atomic<bool> stop = false;
    std::atomic<int> steps = 0;
    // A thread of its own in each step, because a child has only the thread that forked it.
    std::thread other(train_alone, x.clone(), std::cref(stop), std::ref(steps));
    optimizer->zero_grad();
    const torch::Tensor loss = loss_of(net, x);
    loss.backward();
    optimizer->step();
    run.add_loss(loss);
    while (steps == 0) std::this_thread::yield();  // bounded: the driver's time limit
    stop = true;
    other.join();
    expect_children(net, step);
  }
  run.add("net", *net);
}

// Two models on two threads, each with a group of its own.
void two_threads(Run& run) {
  torch::manual_seed(static_cast<std::uint64_t>(1 + run.world.rank()));
  std::array<torch::nn::Sequential, 2> nets = {make_net(), make_net()};
  const std::array<Group, 2> groups = {run.world.split(0), run.world.split(0)};
  std::array<std::vector<torch::Tensor>, 2> batches;
  for (int step = 0; step < kSteps; ++step)
    for (int i : {0, 1})
      batches[static_cast<std::size_t>(i)].push_back(run.part(normal(100 * i + step, {kGlobalBatch, 4})));
  std::array<std::exception_ptr, 2> errors;
  std::vector<std::thread> threads;
  for (std::size_t i : {0, 1})
    threads.emplace_back([&, i] {
      try {
        DistributedDataParallel ddp(nets[i], groups[i]);
        const auto optimizer = make_adam(run, ddp, nets[i]->parameters(), i == 0 ? 0.01 : 0.02);
        for (const torch::Tensor& x : batches[i]) {
          optimizer->zero_grad();
          loss_of(nets[i], x).backward();
          optimizer->step();
        }
      } catch (...) {
        errors[i] = std::current_exception();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
  for (std::size_t i : {0, 1}) run.add("net" + std::to_string(i), *nets[i]);
}

// Each sample of a dataset is used once, so the ranks have different numbers of batches. What must come out is computed
// by hand, by a loop over the ranks with torch's optimizer.

constexpr int kUnevenSamples = 11;

torch::Tensor uneven_sample(int index) { return normal(index, {1, 4}); }

/// The parameters after the training of `net` by all ranks.
void train_uneven_by_hand(const Run& run, torch::nn::Sequential& net, bool divide_by_all) {
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  for (int first = 0; first < kUnevenSamples; first += run.world.size()) {
    const int active = std::min(run.world.size(), kUnevenSamples - first);
    optimizer.zero_grad();
    for (int index = first; index < first + active; ++index)
      (loss_of(net, uneven_sample(index)) / (divide_by_all ? run.world.size() : active)).backward();
    optimizer.step();
  }
}

void train_uneven(Run& run, bool divide_by_all) {
  torch::manual_seed(1);
  torch::nn::Sequential net = make_net(), by_hand = make_net();
  {
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < net->parameters().size(); ++i) by_hand->parameters()[i].copy_(net->parameters()[i]);
  }
  DistributedDataParallel ddp(net, run.world);
  auto optimizer = make_sgd(run, ddp, net->parameters(), 0.05, 0.9);
  int used = 0;
  const auto loop = [&] {
    for (int index = run.world.rank(); index < kUnevenSamples; index += run.world.size()) {
      optimizer->zero_grad();
      loss_of(net, uneven_sample(index)).backward();
      optimizer->step();
      ++used;
    }
  };
  const JoinOptions options = {.divide_by_initial_world_size = divide_by_all};
  if (run.fused && run.world.num_nodes() > 1) {
    const std::string refusal = usage_error_of([&] { join(ddp, loop, options); });
    expect(refusal.find("several hosts") != std::string::npos, refusal);
    optimizer = std::make_unique<torch::optim::SGD>(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  }
  join(ddp, loop, options);
  const torch::Tensor total = torch::tensor({used});
  run.world.all_reduce(total);
  expect(total.item<int>() == kUnevenSamples, "each sample is used once");
  train_uneven_by_hand(run, by_hand, divide_by_all);
  double difference = 0;
  for (std::size_t i = 0; i < net->parameters().size(); ++i)
    difference = std::max(difference, (net->parameters()[i] - by_hand->parameters()[i]).abs().max().item<double>());
  expect(difference < 1e-12, "parameters differ by " + std::to_string(difference) + " from those computed by hand");
  run.add("agrees", 1);
}

void uneven_inputs(Run& run) { train_uneven(run, true); }
void uneven_inputs_active(Run& run) { train_uneven(run, false); }

// Policy gradients (REINFORCE) in a game of one move, with actions drawn from the policy's own distribution.

struct Episode {
  torch::Tensor state, action, reward;
};

/// Plays one move per state. `chance` decides the actions.
Episode play(torch::nn::Sequential& policy, const torch::Tensor& state, const torch::Tensor& chance) {
  const torch::NoGradGuard no_grad;
  const torch::Tensor action = torch::softmax(policy->forward(state), 1).select(1, 0).lt(chance).to(torch::kInt64);
  return {state, action, action.eq(state.select(1, 0).gt(0).to(torch::kInt64)).to(torch::kFloat64)};
}

torch::Tensor policy_loss(torch::nn::Sequential& policy, const Episode& episode, const torch::Tensor& baseline) {
  const torch::Tensor log_probability = torch::log_softmax(policy->forward(episode.state), 1);
  return -(log_probability.gather(1, episode.action.unsqueeze(1)).squeeze(1) * (episode.reward - baseline)).mean();
}

void reinforce(Run& run) {
  torch::manual_seed(static_cast<std::uint64_t>(1 + run.world.rank()));
  torch::nn::Sequential policy = make_net();
  DistributedDataParallel ddp(policy, run.world);
  const auto optimizer = make_adam(run, ddp, policy->parameters(), 0.03);
  for (int step = 0; step < 2 * kSteps; ++step) {
    const Episode episode =
        play(policy, run.part(normal(step, {kGlobalBatch, 4})), run.part(uniform(step, {kGlobalBatch})));
    torch::Tensor baseline = episode.reward.mean();
    run.world.all_reduce(baseline, ReduceOp::kMean);
    optimizer->zero_grad();
    const torch::Tensor loss = policy_loss(policy, episode, baseline);
    loss.backward();
    optimizer->step();
    run.world.step();
    run.add_loss(loss);
    run.add("reward", baseline.item<double>());
  }
  run.add("policy", *policy);
}

// An actor and learners: the last rank plays, the others learn from what it sends. One rank does both in turn.
void actor_and_learners(Run& run) {
  const Group& world = run.world;
  const int actor = world.size() - 1;
  const bool acts = world.rank() == actor, learns = world.rank() < std::max(1, actor);
  Group learners = world.split(learns ? 0 : 1);
  torch::manual_seed(static_cast<std::uint64_t>(1 + world.rank()));
  torch::nn::Sequential policy = make_net();
  std::optional<DistributedDataParallel> ddp;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (learns) {
    ddp.emplace(policy, learners);
    optimizer = make_adam(run, *ddp, policy->parameters(), 0.03);
  }
  const std::int64_t count = kGlobalBatch / std::max(1, actor);  // samples per learner
  for (int step = 0; step < kSteps; ++step) {
    torch::Tensor played = torch::empty({count, 6}, torch::kFloat64);
    for (torch::Tensor& parameter : policy->parameters()) {
      torch::Tensor values = parameter.detach().clone();
      world.broadcast(values, 0, {.name = "policy"});
      if (!learns) parameter.set_data(values);
    }
    if (acts) {
      const Episode episode = play(policy, normal(step, {kGlobalBatch, 4}), uniform(step, {kGlobalBatch}));
      const torch::Tensor all =
          torch::cat({episode.state, episode.action.to(torch::kFloat64).unsqueeze(1), episode.reward.unsqueeze(1)}, 1);
      if (learns) played = all;
      for (int learner = 0; learner < actor; ++learner)
        world.send(all.narrow(0, learner * count, count), learner, {.name = "episodes"});
    }
    if (!learns) continue;
    if (!acts) world.recv(played, actor, {.name = "episodes"});
    const Episode episode = {played.slice(1, 0, 4), played.select(1, 4).to(torch::kInt64), played.select(1, 5)};
    optimizer->zero_grad();
    torch::Tensor loss = policy_loss(policy, episode, torch::full({}, 0.5, torch::kFloat64));
    loss.backward();
    optimizer->step();
    loss = loss.detach().clone();
    learners.all_reduce(loss, ReduceOp::kMean);
    run.add("loss", loss.item<double>());
  }
  if (learns) run.add("policy", *policy, learners);
}

}  // namespace
}  // namespace lockstep::tests::programs::processes

namespace lockstep::tests::programs {

std::vector<Program> process_programs() {
  std::vector<Program> programs;
  const auto add = [&](const std::vector<Program>& more) { programs.insert(programs.end(), more.begin(), more.end()); };
  add(with_both_optimizers("fork_and_threads", processes::fork_and_threads));
  add(with_both_optimizers("two_threads", processes::two_threads));
  add(with_both_optimizers("uneven_inputs", processes::uneven_inputs));
  add(with_both_optimizers("uneven_inputs_active", processes::uneven_inputs_active));
  add(with_both_optimizers("reinforce", processes::reinforce));
  add(with_both_optimizers("actor_and_learners", processes::actor_and_learners));
  return programs;
}

}  // namespace lockstep::tests::programs
