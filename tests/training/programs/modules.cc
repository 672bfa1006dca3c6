// Modules whose tensors have unusual shapes or owners: scalars, views, sparse buffers, parts of two modules.
#include "tests/training/programs/program.h"

namespace lockstep::tests::programs::modules {
namespace {

// Parameters and buffers of unusual shapes: scalars, without elements, with gaps, views of one tensor, expanded
// buffers.

struct OddShapesImpl : torch::nn::Module {
  OddShapesImpl() {
    const auto random = [](at::IntArrayRef shape) { return torch::randn(shape, torch::kFloat64); };
    scale = register_parameter("scale", random({}));
    nothing = register_parameter("nothing", random({0, 3}));
    deep = register_parameter("deep", random({1, 2, 1, 3, 1, 2}));
    inner = register_parameter("inner", random({6, 2}));
    register_parameter("constant", random({3}), /*requires_grad=*/false);
    expanded = register_buffer("expanded", random({2, 1}).expand({2, 4}));
    column = register_buffer("column", random({3, 2}).select(1, 1));
    phase = register_buffer("phase", torch::polar(random({2}).abs(), random({2})).conj());
    mask = register_buffer("mask", random({2}) > 0);
    register_buffer("empty", random({0}));
  }
  torch::Tensor forward(const torch::Tensor& x) const {
    const torch::Tensor y = x.matmul(inner) * expanded.sum() + column.sum() * mask.to(torch::kFloat64);
    return (y.sin() * deep.flatten().slice(0, 0, 2) + nothing.sum()) * scale + deep.sum() + torch::real(phase);
  }
  torch::Tensor scale, nothing, deep, inner, expanded, column, phase, mask;
};
TORCH_MODULE(OddShapes);

void train_odd_shapes(Run& run, BufferMode buffers) {
  torch::manual_seed(static_cast<std::uint64_t>(1 + run.world.rank()));
  OddShapes net;
  DistributedDataParallel ddp(net, run.world, {.buffers = buffers});
  const auto optimizer = make_adam(run, ddp, net->parameters(), 0.02);
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor x = run.part(normal(step, {kGlobalBatch, 6}));
    optimizer->zero_grad();
    const torch::Tensor loss = torch::mse_loss(net->forward(x), x.slice(1, 0, 2));
    loss.backward();
    optimizer->step();
    run.add_loss(loss);
  }
  run.add("net", *net);
}

void odd_shapes(Run& run) {
  train_odd_shapes(run, BufferMode::kBroadcast);
  train_odd_shapes(run, BufferMode::kMean);
}

// Two modules with a common part, as an actor and a critic, and one backward pass through both.

struct HeadImpl : torch::nn::Module {
  HeadImpl(torch::nn::Linear common, std::int64_t outputs) {
    trunk = register_module("trunk", common);
    head = register_module("head", torch::nn::Linear(6, outputs));
  }
  torch::Tensor forward(const torch::Tensor& x) { return head(torch::tanh(trunk(x))); }
  torch::nn::Linear trunk{nullptr}, head{nullptr};
};
TORCH_MODULE(Head);

void shared_trunk(Run& run) {
  torch::manual_seed(static_cast<std::uint64_t>(1 + run.world.rank()));
  torch::nn::Linear trunk(4, 6);
  auto actor = make_module<Head>(run, trunk, 3), critic = make_module<Head>(run, trunk, 1);
  const auto loss_of = [&](int step) {
    const torch::Tensor x = run.part(normal(step, {kGlobalBatch, 4}));
    return torch::cross_entropy_loss(actor->forward(x), x.slice(1, 0, 3).argmax(1)) +
           torch::mse_loss(critic->forward(x).squeeze(1), x.prod(1));
  };
  DistributedDataParallel ddp(actor, run.world);
  {
    DistributedDataParallel whole(critic, run.world);
    const std::string refusal = usage_error_of([&] { loss_of(0).backward(); });
    expect(refusal.find("parameter trunk.weight belongs to two") != std::string::npos, refusal);
  }
  DistributedDataParallel critic_ddp(critic, run.world, {.ignore = {"trunk.weight", "trunk.bias"}});
  const auto optimizer = make_adam(run, ddp, actor->parameters(), 0.02);
  const auto critic_optimizer = make_sgd(run, critic_ddp, critic->head->parameters(), 0.1);
  for (int step = 0; step < kSteps; ++step) {
    optimizer->zero_grad();
    critic_optimizer->zero_grad();
    const torch::Tensor loss = loss_of(step);
    loss.backward();
    optimizer->step();
    critic_optimizer->step();
    run.add_loss(loss);
  }
  run.add("actor", *actor);
  run.add("critic", *critic);
}

// A graph network, as in tutorials: the adjacency matrix is a sparse buffer, which ranks keep for themselves.

struct GraphNetImpl : torch::nn::Module {
  GraphNetImpl() {
    const torch::Tensor edges = (torch::arange(kGlobalBatch).outer(torch::arange(kGlobalBatch)) % 5).eq(2);
    register_buffer("adjacency", edges.to(torch::kFloat64).to_sparse());
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor adjacency = named_buffers()["adjacency"];
    return output(adjacency.matmul(torch::relu(hidden(adjacency.matmul(x)))));
  }
  torch::nn::Linear hidden = register_module("hidden", torch::nn::Linear(3, 8));
  torch::nn::Linear output = register_module("output", torch::nn::Linear(8, 2));
};
TORCH_MODULE(GraphNet);

void graph_network(Run& run) {
  auto net = make_module<GraphNet>(run);
  const std::string refusal = usage_error_of([&] { DistributedDataParallel refused(net, run.world); });
  expect(refusal.find("buffer adjacency is sparse") != std::string::npos, refusal);
  DistributedDataParallel ddp(net, run.world, {.ignore = {"adjacency"}});
  const auto optimizer = make_adam(run, ddp, net->parameters(), 0.05);
  const torch::Tensor x = normal(0, {kGlobalBatch, 3});
  const torch::Tensor classes = run.part(x.select(1, 0).gt(0).to(torch::kInt64));
  for (int step = 0; step < kSteps; ++step) {
    optimizer->zero_grad();
    const torch::Tensor loss = torch::cross_entropy_loss(run.part(net->forward(x)), classes);
    loss.backward();
    optimizer->step();
    run.add_loss(loss);
  }
  for (const auto& item : net->named_parameters()) run.add(item.key(), item.value());
}

// All parameters are views of one flat tensor, as in programs that exchange the flat one.

struct FlatImpl : torch::nn::Module {
  FlatImpl() {
    const torch::Tensor flat = torch::randn({26}, torch::kFloat64);
    first = register_parameter("first", flat.narrow(0, 0, 20).view({5, 4}));
    second = register_parameter("second", flat.narrow(0, 20, 6).view({3, 2}).t());
  }
  torch::Tensor forward(const torch::Tensor& x) const {
    return torch::tanh(x.matmul(first)).slice(1, 0, 2).matmul(second);
  }
  torch::Tensor first, second;
};
TORCH_MODULE(Flat);

void flat_parameters(Run& run) {
  torch::manual_seed(static_cast<std::uint64_t>(1 + run.world.rank()));
  Flat net;
  DistributedDataParallel ddp(net, run.world);
  const auto optimizer = make_adam(run, ddp, net->parameters(), 0.02);
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor x = run.part(normal(step, {kGlobalBatch, 5}));
    optimizer->zero_grad();
    const torch::Tensor loss = torch::mse_loss(net->forward(x), x.slice(1, 0, 3));
    loss.backward();
    optimizer->step();
    run.add_loss(loss);
  }
  run.add("net", *net);
}

// A parameter that is a part of a larger tensor, whose other elements nobody trains. Fused optimizers refuse it.

struct GapsImpl : torch::nn::Module {
  GapsImpl() : all(torch::randn({6, 4}, torch::kFloat64)) { part = register_parameter("part", all.slice(1, 0, 4, 2)); }
  torch::Tensor forward(const torch::Tensor& x) const { return torch::tanh(x.matmul(part)); }
  torch::Tensor all, part;
};
TORCH_MODULE(Gaps);

void gaps(Run& run) {
  torch::manual_seed(static_cast<std::uint64_t>(1 + run.world.rank()));
  Gaps net;
  DistributedDataParallel ddp(net, run.world);
  const std::string refusal = usage_error_of([&] { optim::Adam refused(ddp, {.lr = 0.1}); });
  expect(refusal.find("part") != std::string::npos, refusal);
  torch::optim::Adam optimizer(net->parameters(), 0.02);
  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor x = run.part(normal(step, {kGlobalBatch, 6}));
    optimizer.zero_grad();
    const torch::Tensor loss = torch::mse_loss(net->forward(x), x.slice(1, 0, 2));
    loss.backward();
    optimizer.step();
    run.add_loss(loss);
  }
  run.add("net", *net);
}

}  // namespace
}  // namespace lockstep::tests::programs::modules

namespace lockstep::tests::programs {

std::vector<Program> module_programs() {
  std::vector<Program> programs;
  const auto add = [&](const std::vector<Program>& more) { programs.insert(programs.end(), more.begin(), more.end()); };
  add(with_all_optimizers("odd_shapes", modules::odd_shapes));
  add(with_both_optimizers("flat_parameters", modules::flat_parameters));
  for (Program& program : with_both_optimizers("shared_trunk", modules::shared_trunk)) {
    program.warning = "its ranks have never exchanged gradients";  // those of the refused one
    programs.push_back(program);
  }
  add(with_both_optimizers("graph_network", modules::graph_network));
  add({{.name = "gaps", .train = modules::gaps}});
  return programs;
}

}  // namespace lockstep::tests::programs
