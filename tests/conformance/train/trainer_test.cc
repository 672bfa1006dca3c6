// Tests the loop of the Trainer against handwritten loops, and its validation, callbacks, limits and errors.
#include "lockstep/train/trainer.h"

#include <gmock/gmock.h>

#include <chrono>
#include <csignal>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/amp/precision.h"
#include "lockstep/base/error.h"
#include "lockstep/optim/adam.h"
#include "lockstep/optim/clip_grad.h"
#include "lockstep/optim/sgd.h"
#include "tests/conformance/ddp/test_models.h"
#include "tests/support/temp_dir.h"

namespace lockstep::tests::trainer_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using namespace lockstep::training;  // NOLINT(google-build-using-namespace): the tested module
using data::Example;
using ddp::DistributedDataParallel;

/// Returns a sample whose values depend only on its index.
Example sample(std::size_t index) {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(index + 1);
  return {at::randn({7}, generator), at::randn({5}, generator)};
}

constexpr std::uint64_t kSamples = 50;
data::Loader<Example> loader_of(std::int64_t batch_size = 4, std::uint64_t samples = kSamples) {
  return data::make_loader(samples, sample, world(), {.batch_size = batch_size, .seed = 3});
}
data::Loader<Example> exact_loader(std::uint64_t samples) {
  return data::make_loader(samples, sample, world(),
                           {.batch_size = 2, .shuffle = false, .mode = data::ShardMode::kExact});
}

using MakeOptimizers = std::function<std::vector<OptimizerConfig>(torch::nn::Module& net, TrainingSetup& setup)>;

struct NetImpl : MlpImpl {
  MakeOptimizers make;
  std::vector<std::int64_t> trained;    // numbers of batches
  std::vector<std::int64_t> validated;  // sizes of batches
  bool was_training = false, was_in_eval = false;

  at::Tensor loss(const Example& batch) {
    return torch::mse_loss(forward(batch.data.to(first->weight.scalar_type())).to(torch::kFloat),
                           batch.target.to(torch::kFloat));
  }
  at::Tensor training_step(Example& batch, StepLog& log) {
    trained.push_back(log.batch);
    was_training |= is_training();
    EXPECT_EQ(log.num_samples, batch.data.size(0));
    return loss(batch);
  }
  at::Tensor validation_step(Example& batch, StepLog& log) {
    validated.push_back(batch.data.size(0));
    was_in_eval |= !is_training();
    log.log("val_first", batch.data.select(1, 0).mean());
    return loss(batch);
  }
  std::vector<OptimizerConfig> configure_optimizers(TrainingSetup& setup) { return make(*this, setup); }
};
TORCH_MODULE(Net);

Net make_net(MakeOptimizers make) {
  torch::manual_seed(1);
  Net net;
  net->make = std::move(make);
  return net;
}

MakeOptimizers sgd(optim::Schedule schedule = nullptr) {
  return [schedule](torch::nn::Module&, TrainingSetup& setup) -> std::vector<OptimizerConfig> {
    return {{std::make_shared<torch::optim::SGD>(setup.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)),
             schedule}};
  };
}

TrainerOptions without_output(TrainerOptions options = {}) {
  options.progress_bar = options.model_summary = false;
  options.folder = "";
  return options;
}

void expect_same_bits(torch::nn::Module& got, torch::nn::Module& expected) {
  const auto a = got.parameters(), b = expected.parameters();
  for (std::size_t i = 0; i < a.size(); ++i)
    EXPECT_TRUE(torch::equal(a[i], b[i])) << i << ": by " << (a[i] - b[i]).abs().max().item<double>();
}

TEST(Trainer, EqualsPlainLoop) {
  Net net = make_net(sgd()), plain = make_net(nullptr);
  Trainer trainer(without_output({.max_epochs = 2}));
  const FitResult result = trainer.fit(net, loader_of());
  auto loader = loader_of();
  EXPECT_EQ(result.reason, StopReason::kCompleted);
  EXPECT_EQ(result.epochs, 2);
  EXPECT_EQ(result.steps, static_cast<std::int64_t>(2 * loader.batches_per_epoch()));
  EXPECT_TRUE(net->was_training);

  DistributedDataParallel ddp(plain, world());
  torch::optim::SGD optimizer(plain->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (std::uint64_t epoch = 0; epoch < 2; ++epoch)
    for (auto& batch : loader.epoch(epoch)) {
      optimizer.zero_grad();
      plain->loss(batch).backward();
      optimizer.step();
    }
  expect_same_bits(*net, *plain);
}

TEST(Trainer, AccumulatesAndAveragesLastStepOfEpoch) {
  Net net = make_net(sgd()), plain = make_net(nullptr);
  Trainer trainer(without_output({.max_epochs = 1, .accumulate_grad_batches = 3, .clip_norm = 0.05}));
  const FitResult result = trainer.fit(net, loader_of(2, 44));
  auto loader = loader_of(2, 44);
  const auto batches = static_cast<std::int64_t>(loader.batches_per_epoch());
  EXPECT_EQ(result.steps, (batches + 2) / 3);

  DistributedDataParallel ddp(plain, world());
  torch::optim::SGD optimizer(plain->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  std::int64_t index = 0;
  for (auto& batch : loader.epoch(0)) {
    const std::int64_t in_step = std::min<std::int64_t>(3, batches - index / 3 * 3);
    if (index % 3 == 0) optimizer.zero_grad();
    const bool last = index % 3 == 2 || index + 1 == batches;
    std::optional<DistributedDataParallel::NoSync> held;
    if (!last) held.emplace(ddp);
    const at::Tensor loss = plain->loss(batch);
    (in_step == 1 ? loss : loss / static_cast<double>(in_step)).backward();
    if (last) {
      optim::clip_grad_norm(plain->parameters(), 0.05);
      optimizer.step();
    }
    ++index;
  }
  expect_same_bits(*net, *plain);
}

TEST(Trainer, ScheduleAdvancesPerStepOrEpoch) {
  for (const bool by_epoch : {false, true}) {
    std::shared_ptr<torch::optim::SGD> optimizer;
    Net net = make_net([&](torch::nn::Module&, TrainingSetup& setup) -> std::vector<OptimizerConfig> {
      optimizer = std::make_shared<torch::optim::SGD>(setup.parameters(), torch::optim::SGDOptions(1e-3));
      EXPECT_EQ(setup.total_steps(), 3 * setup.steps_per_epoch());
      return {{.optimizer = optimizer,
               .schedule =
                   optim::lambda_schedule([](std::int64_t step) { return 1.0 / (1.0 + static_cast<double>(step)); }),
               .schedule_by_epoch = by_epoch}};
    });
    Trainer trainer(without_output({.max_epochs = 3, .accumulate_grad_batches = 2}));
    const FitResult result = trainer.fit(net, loader_of());
    const double moved = by_epoch ? 3 : static_cast<double>(result.steps);
    EXPECT_DOUBLE_EQ(optimizer->param_groups()[0].options().get_lr(), 1e-3 / (1 + moved));
  }
}

TEST(Trainer, UsesFusedOptimizersAndTheirSteps) {
  Net net = make_net([](torch::nn::Module&, TrainingSetup& setup) -> std::vector<OptimizerConfig> {
    return {{std::make_shared<optim::AdamW>(setup.ddp(), optim::AdamWOptions{.lr = 0.01})}};
  });
  Net plain = make_net(nullptr);
  Trainer trainer(without_output({.max_epochs = 1, .clip_norm = 0.5}));
  const std::int64_t before = world().steps();
  const FitResult result = trainer.fit(net, loader_of());
  EXPECT_EQ(world().steps() - before, result.steps);
  DistributedDataParallel ddp(plain, world());
  optim::AdamW optimizer(ddp, {.lr = 0.01});
  auto loader = loader_of();
  for (auto& batch : loader.epoch(0)) {
    optimizer.zero_grad();
    plain->loss(batch).backward();
    optim::clip_grad_norm(optimizer, 0.5);
    optimizer.step();
  }
  expect_same_bits(*net, *plain);
}

TEST(Trainer, TorchOptimizersEndGroupStep) {
  Net net = make_net(sgd());
  Trainer trainer(without_output({.max_steps = 4, .accumulate_grad_batches = 2}));
  const std::int64_t before = world().steps();
  EXPECT_EQ(trainer.fit(net, loader_of()).steps, 4);
  EXPECT_EQ(world().steps() - before, 4);
}

TEST(Trainer, TrainsInLowerPrecision) {
  for (const char* precision : {"bf16-mixed", "bf16", "O2", "fp16-mixed"}) {
    Net net = make_net(sgd());
    Trainer trainer(without_output({.max_epochs = 3, .precision = precision, .clip_value = 1}));
    const FitResult result = trainer.fit(net, loader_of(), exact_loader(20));
    const auto dtype = amp::parse_precision(precision).weights;
    EXPECT_EQ(net->first->weight.scalar_type(), dtype) << precision;
    EXPECT_TRUE(same_bits(net->first->weight.detach())) << precision;
    EXPECT_LT(require_value(result.val_values, "val_loss", "test"), 1.3) << precision;
  }
}

/// A generator and a discriminator with an optimizer each.
struct GanImpl : torch::nn::Module {
  Mlp generator{nullptr}, discriminator{nullptr};
  bool fused = false;
  GanImpl() : generator(register_module("generator", Mlp())), discriminator(register_module("judge", Mlp())) {}
  at::Tensor training_step(Example& batch, StepLog& log) {
    const at::Tensor made = generator->forward(batch.data);
    const at::Tensor judged = torch::cat({made, made.slice(1, 0, 2)}, 1);
    return log.optimizer == 0 ? discriminator->forward(judged).mean()
                              : torch::mse_loss(discriminator->forward(judged.detach()), batch.target);
  }
  std::vector<OptimizerConfig> configure_optimizers(TrainingSetup& setup) {
    if (fused)
      return {{std::make_shared<optim::SGD>(setup.ddp(generator), optim::SGDOptions{.lr = 0.05})},
              {std::make_shared<optim::SGD>(setup.ddp(discriminator), optim::SGDOptions{.lr = 0.02})}};
    return {{std::make_shared<torch::optim::SGD>(generator->parameters(), torch::optim::SGDOptions(0.05))},
            {std::make_shared<torch::optim::SGD>(discriminator->parameters(), torch::optim::SGDOptions(0.02))}};
  }
};
TORCH_MODULE(Gan);

TEST(Trainer, SeveralOptimizersAlternate) {
  for (const bool fused : {false, true}) {
    torch::manual_seed(1);
    Gan gan, plain;
    for (const auto& parameter : plain->named_parameters()) {
      const torch::NoGradGuard no_grad;
      plain->named_parameters()[parameter.key()].copy_(gan->named_parameters()[parameter.key()]);
    }
    gan->fused = fused;
    Trainer trainer(without_output({.max_epochs = 1, .accumulate_grad_batches = 2}));
    trainer.fit(gan, loader_of());

    DistributedDataParallel first(plain->generator, world()), second(plain->discriminator, world());
    torch::optim::SGD generator(plain->generator->parameters(), torch::optim::SGDOptions(0.05)),
        discriminator(plain->discriminator->parameters(), torch::optim::SGDOptions(0.02));
    Metrics unused;
    StepLog log(unused, "");
    auto loader = loader_of();
    const auto batches = static_cast<std::int64_t>(loader.batches_per_epoch());
    std::int64_t index = 0;
    for (auto& batch : loader.epoch(0)) {
      const bool alone = index % 2 == 0 && index + 1 == batches, last = index % 2 == 1 || alone;
      std::optional<DistributedDataParallel::NoSync> held[2];
      if (!last) held[0].emplace(first), held[1].emplace(second);
      for (const int turn : {0, 1}) {
        log.optimizer = turn;
        for (const auto& parameter : plain->generator->parameters()) parameter.requires_grad_(turn == 0);
        for (const auto& parameter : plain->discriminator->parameters()) parameter.requires_grad_(turn == 1);
        auto& optimizer = turn == 0 ? generator : discriminator;
        if (index % 2 == 0) optimizer.zero_grad();
        (plain->training_step(batch, log) / (alone ? 1.0 : 2.0)).backward();
        if (last) optimizer.step();
      }
      ++index;
    }
    const auto a = gan->parameters(), b = plain->parameters();
    for (std::size_t i = 0; i < a.size(); ++i)
      EXPECT_TRUE(torch::allclose(a[i], b[i], 1e-5, 1e-6)) << fused << " " << i;
  }
}

TEST(Trainer, ValidationMeansAreWeightedBySamples) {
  for (const std::uint64_t samples : {1, 7, 20}) {
    Net net = make_net(sgd());
    Trainer trainer(without_output());
    const NamedValues values = trainer.validate(net, exact_loader(samples));
    double loss = 0, first = 0;
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < samples; ++i) {
      const Example one = sample(i);
      loss += torch::mse_loss(net->forward(one.data.unsqueeze(0)), one.target.unsqueeze(0)).item<double>();
      first += one.data[0].item<double>();
    }
    EXPECT_NEAR(require_value(values, "val_loss", "test"), loss / static_cast<double>(samples), 1e-6) << samples;
    EXPECT_NEAR(require_value(values, "val_first", "test"), first / static_cast<double>(samples), 1e-6) << samples;
    EXPECT_TRUE(net->is_training());
  }
}

TEST(TrainerFailures, ReplicasAreComparedAtTheEnd) {
  if (world().size() == 1) return;
  struct ChangeLast : Callback {
    void on_step(FitContext& fit) override {
      const torch::NoGradGuard no_grad;
      if (fit.step() == 3 && fit.world().rank() == fit.world().size() - 1) fit.module().parameters()[0].add_(1);
    }
  };
  Net net = make_net(sgd());
  expect_error(
      base::Cause::kReplicaDiverged, {"first.weight differs between ranks"},
      [&] {
        Trainer trainer(without_output({.max_steps = 3}));
        trainer.add(std::make_shared<ChangeLast>());
        trainer.fit(net, loader_of());
      },
      std::chrono::seconds(60));
}

TEST(Trainer, ValidationWithPaddedSamplerIsRejected) {
  if (world().size() == 1) return;
  Net net = make_net(sgd());
  Trainer trainer(without_output());
  const auto padded =
      data::make_loader(kSamples * static_cast<std::uint64_t>(world().size()) + 1, sample, world(), {.batch_size = 2});
  EXPECT_THAT(tests::message_of<base::UsageError>([&] { trainer.validate(net, padded); }), HasSubstr("kPad"));
}

/// Records its calls.
struct EventRecorder : Callback {
  std::vector<std::string> events;
  std::int64_t end_at = -1;
  void on_fit_start(FitContext&) override { events.emplace_back("start"); }
  void on_step(FitContext& fit) override {
    events.push_back("step " + std::to_string(fit.step()));
    if (fit.step() == end_at) fit.stop(StopReason::kCallback);
  }
  void on_validation_end(FitContext&, const NamedValues&) override { events.emplace_back("validation"); }
  void on_epoch_end(FitContext& fit) override { events.push_back("epoch " + std::to_string(fit.epoch())); }
  void on_fit_end(FitContext&, StopReason) override { events.emplace_back("end"); }
};

TEST(Trainer, CallsCallbacksInOrder) {
  Net net = make_net(sgd());
  Trainer trainer(
      without_output({.max_epochs = 2, .limit_train_batches = 2, .limit_val_batches = 1, .val_check_interval = 1}));
  const auto recorder = std::make_shared<EventRecorder>();
  trainer.add(recorder);
  trainer.fit(net, loader_of(), exact_loader(20));
  EXPECT_THAT(recorder->events, ElementsAre("start", "step 1", "validation", "step 2", "validation", "epoch 0",
                                            "step 3", "validation", "step 4", "validation", "epoch 1", "end"));
  EXPECT_TRUE(net->was_in_eval);
}

TEST(Trainer, CallbackEndsTraining) {
  Net net = make_net(sgd());
  Trainer trainer(without_output({.max_epochs = 10}));
  const auto recorder = std::make_shared<EventRecorder>();
  recorder->end_at = 3;
  trainer.add(recorder);
  const FitResult result = trainer.fit(net, loader_of());
  EXPECT_EQ(result.reason, StopReason::kCallback);
  EXPECT_EQ(result.steps, 3);
  EXPECT_EQ(result.epochs, 0);
  EXPECT_EQ(recorder->events.back(), "end");
  EXPECT_EQ(recorder->events[recorder->events.size() - 2], "step 3");
  EXPECT_EQ(result.exit_code(), 0);
}

TEST(Trainer, StopsEarlyWithoutImprovement) {
  Net net = make_net([](torch::nn::Module&, TrainingSetup& setup) -> std::vector<OptimizerConfig> {
    return {{std::make_shared<torch::optim::SGD>(setup.parameters(), torch::optim::SGDOptions(0.0))}};
  });
  Trainer trainer(without_output({.max_epochs = 50}));
  trainer.add(std::make_shared<EarlyStopping>(EarlyStoppingOptions{.patience = 2}));
  const FitResult result = trainer.fit(net, loader_of(), exact_loader(20));
  EXPECT_EQ(result.reason, StopReason::kCallback);
  EXPECT_EQ(result.epochs, 4);  // the first is the best, and patience allows two that are not better
}

TEST(Trainer, MaxTime) {
  Net net = make_net(sgd());
  Trainer trainer(without_output({.max_time = std::chrono::seconds(1)}));
  const auto began = std::chrono::steady_clock::now();
  const FitResult result = trainer.fit(net, loader_of());
  EXPECT_EQ(result.reason, StopReason::kMaxTime);
  EXPECT_EQ(result.exit_code(), 0);
  if (world().rank() == 0) {
    EXPECT_GE(std::chrono::steady_clock::now() - began, std::chrono::seconds(1));  // the clock of rank 0 decides
  }
  const std::int64_t steps = result.steps;
  for (const std::string& other : world().all_gather_bytes(std::to_string(steps)))
    EXPECT_EQ(other, std::to_string(steps));
}

TEST(Trainer, LogsMeansOverRanksAndSamples) {
  struct LogRecorder : Callback {
    std::vector<NamedValues> values;
    void on_log(FitContext&, const NamedValues& now) override { values.push_back(now); }
  };
  Net net = make_net([](torch::nn::Module&, TrainingSetup& setup) -> std::vector<OptimizerConfig> {
    return {{std::make_shared<torch::optim::SGD>(setup.parameters(), torch::optim::SGDOptions(0.0))}};
  });
  Trainer trainer(without_output({.max_epochs = 1, .log_every_n_steps = 2}));
  const auto seen = std::make_shared<LogRecorder>();
  trainer.add(seen);
  const FitResult result = trainer.fit(net, loader_of());
  ASSERT_EQ(static_cast<std::int64_t>(seen->values.size()), (result.steps + 1) / 2);
  Metrics expected;  // with a learning rate of 0 the losses do not change
  auto loader = loader_of();
  for (auto& batch : loader.epoch(0)) expected.add("loss", net->loss(batch), static_cast<double>(batch.data.size(0)));
  EXPECT_NEAR(require_value(result.train_values, "loss", "test"), mean_over_ranks(expected, world())[0].second, 1e-6);
}

TEST(Trainer, MetricsMayHaveTheNamesOfUsage) {
  struct Busy : NetImpl {
    at::Tensor training_step(Example& batch, StepLog& log) {
      log.log("gpu/busy", 0.5);
      log.log("throughput/sent_mb_per_second", 7.0);
      return loss(batch);
    }
  };
  struct LogRecorder : Callback {
    std::vector<NamedValues> values;
    void on_log(FitContext&, const NamedValues& now) override { values.push_back(now); }
  };
  auto net = std::make_shared<Busy>();
  net->make = sgd();
  Trainer trainer(without_output({.max_steps = 2, .log_every_n_steps = 1}));
  const auto seen = std::make_shared<LogRecorder>();
  trainer.add(seen);
  trainer.fit(net, loader_of());
  ASSERT_EQ(seen->values.size(), 2u);
  for (const NamedValues& values : seen->values)
    EXPECT_THAT(values, ElementsAre(testing::Pair("gpu/busy", 0.5), testing::Pair("loss", testing::_),
                                    testing::Pair("throughput/sent_mb_per_second", 7.0)));
}

TEST(Trainer, OverfitBatches) {
  Net net = make_net(sgd());
  Trainer trainer(without_output({.max_epochs = 3, .overfit_batches = 2}));
  trainer.fit(net, loader_of());
  EXPECT_THAT(net->trained, ElementsAre(0, 1, 0, 1, 0, 1));
}

TEST(Trainer, UserExceptionReportsStepAndSamples) {
  if (world().size() > 1) return;  // the errors on other ranks are tested in other suites
  struct Broken : NetImpl {
    at::Tensor training_step(Example&, StepLog&) { throw std::out_of_range("mine"); }
  };
  auto net = std::make_shared<Broken>();
  net->make = sgd();
  Trainer trainer(without_output({.max_epochs = 1}));
  try {
    trainer.fit(net, loader_of());
    FAIL();
  } catch (const StepError& error) {
    EXPECT_THAT(
        error.what(),
        testing::MatchesRegex(
            "training_step\\(\\) of step 1 \\(epoch 1, batch 1, samples [0-9]+, [0-9]+, [0-9]+, [0-9]+\\): mine"));
    EXPECT_THROW(std::rethrow_if_nested(error), std::out_of_range);
  }
}

TEST(Trainer, RejectsDifferentNumberOfHosts) {
  EXPECT_THAT(tests::message_of<base::UsageError>([&] { const Trainer trainer(without_output({.nodes = 9})); }),
              HasSubstr("TrainerOptions.nodes is 9, but this job has " + std::to_string(world().num_nodes())));
}

TEST(Trainer, RejectsModuleWithoutOptimizers) {
  Net net = make_net([](torch::nn::Module&, TrainingSetup&) -> std::vector<OptimizerConfig> { return {}; });
  Trainer trainer(without_output({.max_epochs = 1}));
  EXPECT_THROW(trainer.fit(net, loader_of()), base::UsageError);
}

/// The last case: a stop request stays set in the process.
TEST(Trainer, StopRequestToOneRankEndsAllInSameStep) {
  struct RaiseStopSignal : Callback {
    void on_step(FitContext& fit) override {
      if (fit.step() == 3 && fit.world().rank() == fit.world().size() - 1) std::raise(SIGUSR1);
    }
  };
  Net net = make_net(sgd());
  Trainer trainer(without_output({.max_epochs = 100}));
  trainer.add(std::make_shared<RaiseStopSignal>());
  const FitResult result = trainer.fit(net, loader_of());
  EXPECT_EQ(result.reason, StopReason::kStopRequested);
  EXPECT_EQ(result.exit_code(), 75);
  EXPECT_LE(result.steps, 5);
  for (const std::string& other : world().all_gather_bytes(std::to_string(result.steps)))
    EXPECT_EQ(other, std::to_string(result.steps));
}

}  // namespace
}  // namespace lockstep::tests::trainer_test
