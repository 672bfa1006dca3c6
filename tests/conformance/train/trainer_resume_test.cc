// Tests that a training which was stopped and resumed equals one that was never stopped, and its checkpoints and
// errors.
#include <gmock/gmock.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/checkpoint/module_io.h"
#include "lockstep/checkpoint/saved_checkpoint.h"
#include "lockstep/optim/adam.h"
#include "lockstep/optim/sgd.h"
#include "lockstep/train/trainer.h"
#include "tests/conformance/train/resumable.h"
#include "tests/support/faulty_files.h"
#include "tests/support/shared_dir.h"
#include "tests/support/temp_dir.h"

namespace lockstep::tests::trainer_resume_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::SizeIs;
using namespace lockstep::training;  // NOLINT(google-build-using-namespace): the tested module
using data::Example;

/// Compares a run that resumed after step `stopped_at` with an uninterrupted run.
void expect_equal(const RunResult& got, const RunResult& expected, std::int64_t stopped_at) {
  SCOPED_TRACE("stopped after step " + std::to_string(stopped_at));
  EXPECT_EQ(got.result.steps, expected.result.steps);
  EXPECT_EQ(got.result.epochs, expected.result.epochs);
  EXPECT_EQ(got.drawn, expected.drawn);
  EXPECT_EQ(got.best, expected.best);
  ASSERT_EQ(got.result.train_values.size(), expected.result.train_values.size());
  for (std::size_t i = 0; i < got.result.train_values.size(); ++i)  // sums over the steps before and after the stop
    EXPECT_NEAR(got.result.train_values[i].second, expected.result.train_values[i].second, 1e-12)
        << got.result.train_values[i].first;
  EXPECT_EQ(got.result.val_values, expected.result.val_values);
  ASSERT_EQ(got.weights.size(), expected.weights.size());
  for (std::size_t i = 0; i < got.weights.size(); ++i)
    EXPECT_TRUE(torch::equal(got.weights[i], expected.weights[i]))
        << i << ": " << got.weights[i] << expected.weights[i];
}

/// Returns the steps after which to stop, given the number of steps per epoch.
using StopPoints = std::function<std::vector<std::int64_t>(std::int64_t per_epoch)>;
std::vector<std::int64_t> few_stop_points(std::int64_t per_epoch) { return {per_epoch - 1, per_epoch, per_epoch + 2}; }
std::vector<std::int64_t> many_stop_points(std::int64_t per_epoch) {
  return {1, per_epoch - 1, per_epoch, per_epoch + 1, 2 * per_epoch - 1, 2 * per_epoch};
}

/// Stops trainings after each of `points`, resumes them, and compares them with an uninterrupted one.
void expect_exact_resume(const MakeOptimizers& make, TrainerOptions options,
                         const StopPoints& points = few_stop_points) {
  const SharedDir dir;
  options.folder = dir.path();
  options.max_epochs = 2;
  const RunResult expected = run(make, options, -1);
  for (const std::int64_t stop_at : points(expected.result.steps / 2)) {
    TrainerOptions interrupted = options;
    interrupted.name = "stopped-" + std::to_string(stop_at);
    const RunResult stopped = run(make, interrupted, stop_at);
    EXPECT_EQ(stopped.result.steps, stop_at);
    EXPECT_EQ(stopped.result.exit_code(), 75);
    interrupted.resume = "auto";
    expect_equal(run(make, interrupted, -1), expected, stop_at);
  }
}

MakeOptimizers torch_adam() {
  return [](torch::nn::Module&, TrainingSetup& setup) -> std::vector<OptimizerConfig> {
    return {
        {std::make_shared<torch::optim::AdamW>(setup.parameters(), torch::optim::AdamWOptions(0.01).amsgrad(true))}};
  };
}
MakeOptimizers fused(optim::FusedOptions options = {}) {
  return [options](torch::nn::Module&, TrainingSetup& setup) -> std::vector<OptimizerConfig> {
    return {{std::make_shared<optim::AdamW>(setup.ddp(), optim::AdamWOptions{.lr = 0.01},
                                            std::vector<optim::AdamW::Group>{}, options),
             optim::step_decay({.every = 1, .factor = 0.5}), /*schedule_by_epoch=*/true}};
  };
}

TEST(Resume, SgdWithMomentumAndASchedule) { expect_exact_resume(sgd(), {}, many_stop_points); }
TEST(Resume, TorchAdamWithAccumulationClippingAndEma) {
  expect_exact_resume(torch_adam(), {.accumulate_grad_batches = 2, .clip_norm = 0.5, .ema = 0.9});
}
TEST(Resume, FusedOptimizerWithEpochSchedule) { expect_exact_resume(fused(), {.ema = 0.9}); }
TEST(Resume, FusedOptimizerWithShardedState) { expect_exact_resume(fused({.shard_state = true}), {}); }
// Each host has its own weights, optimizer and outer state, also between two rounds.
TEST(Resume, HostsThatTrainApart) {
  for (const ddp::OuterMethod& outer :
       {ddp::OuterMethod(), ddp::OuterMethod(ddp::DiLoCo{.payload = ddp::Payload::kInt8})}) {
    const MakeOptimizers apart = [outer](torch::nn::Module& net,
                                         training::TrainingSetup& setup) -> std::vector<training::OptimizerConfig> {
      setup.ddp(net, {.average_hosts_every = 5, .outer = outer});
      return {{std::make_shared<torch::optim::AdamW>(setup.parameters(), torch::optim::AdamWOptions(0.01))}};
    };
    expect_exact_resume(apart, {}, many_stop_points);
  }
}
TEST(Resume, LossScaling) { expect_exact_resume(sgd(), {.precision = "fp16-mixed"}); }
TEST(Resume, MasterWeightsInFloat32) { expect_exact_resume(sgd(), {.precision = "O2"}); }
TEST(Resume, ValidationInsideEpoch) { expect_exact_resume(sgd(), {.val_check_interval = 2}, many_stop_points); }
TEST(Resume, OverfitBatches) { expect_exact_resume(sgd(), {.overfit_batches = 3}); }
TEST(Resume, SynchronousSaveAndLoggingEveryStep) {
  expect_exact_resume(sgd(), {.save_async = false, .log_every_n_steps = 1});
}

TEST(Resume, TwoOptimizers) {
  expect_exact_resume(
      [](torch::nn::Module& module, TrainingSetup& setup) -> std::vector<OptimizerConfig> {
        auto& net = dynamic_cast<NetImpl&>(module);
        std::vector<at::Tensor> rest = net.second->parameters();
        for (const at::Tensor& tensor : net.norm->parameters()) rest.push_back(tensor);
        setup.ddp();
        return {
            {std::make_shared<torch::optim::SGD>(net.first->parameters(), torch::optim::SGDOptions(0.1).momentum(0.5))},
            {std::make_shared<torch::optim::Adam>(rest, torch::optim::AdamOptions(0.01))}};
      },
      {});
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  if (std::filesystem::exists(folder))
    for (const auto& item : std::filesystem::directory_iterator(folder))
      names.push_back(item.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

TEST(Resume, NewRunGetsItsOwnFolder) {
  const SharedDir dir;
  const TrainerOptions options{.max_epochs = 1, .folder = dir.path(), .name = "net"};
  EXPECT_EQ(run(sgd(), options, -1).result.folder, dir.path() + "/net");
  EXPECT_EQ(run(sgd(), options, -1).result.folder, dir.path() + "/net-2");
  EXPECT_EQ(run(sgd(), {.max_epochs = 2, .folder = dir.path(), .name = "net", .resume = "auto"}, -1).result.folder,
            dir.path() + "/net-2");
  world().barrier();
  EXPECT_THAT(names_in(dir.path()), ElementsAre("net", "net-2"));
  EXPECT_THAT(names_in(dir.path() + "/net-2/checkpoints"), SizeIs(3)) << "two checkpoints and LATEST";
}

TEST(Resume, TwoTrainingsResumeInTheirOwnFolders) {
  const SharedDir dir;
  for (const char* resume : {"", "auto"}) {
    TrainerOptions options{.max_epochs = 1,
                           .folder = dir.path(),
                           .name = "net",
                           .resume = resume,
                           .progress_bar = false,
                           .model_summary = false};
    Trainer trainer(options);
    Net first(sgd()), second(sgd());
    EXPECT_EQ(trainer.fit(first, loader_of()).folder, dir.path() + "/net");
    const FitResult result = trainer.fit(second, loader_of());
    EXPECT_EQ(result.folder, dir.path() + "/net.2");
    EXPECT_EQ(result.epochs, 1);
  }
}

TEST(Resume, FromPathIntoNewFolder) {
  const SharedDir dir;
  const RunResult expected = run(sgd(), {.max_epochs = 2, .folder = dir.path(), .name = "never-stopped"}, -1);
  run(sgd(), {.max_epochs = 2, .folder = dir.path(), .name = "first"}, 3);
  world().barrier();
  std::string checkpoint;
  for (const std::string& name : names_in(dir.path() + "/first/checkpoints"))
    if (name != "LATEST") checkpoint = name;
  for (const std::string& path :
       {dir.path() + "/first", dir.path() + "/first/", dir.path() + "/first/checkpoints/" + checkpoint}) {
    const RunResult got = run(sgd(), {.max_epochs = 2, .folder = dir.path(), .name = "second", .resume = path}, -1);
    EXPECT_THAT(got.result.folder, HasSubstr("/second"));
    expect_equal(got, expected, 3);
  }
  const RunResult without_folder = run(sgd(), {.max_epochs = 2, .folder = "", .resume = dir.path() + "/first"}, -1);
  expect_equal(without_folder, expected, 3);
}

TEST(Resume, InvalidPathIsRejected) {
  const SharedDir dir;
  for (const std::string& path : {dir.path() + "/none", dir.path()}) {
    EXPECT_THAT(tests::message_of<base::UsageError>(
                    [&] { run(sgd(), {.max_epochs = 1, .folder = dir.path() + "/runs", .resume = path}, -1); }),
                HasSubstr("\"" + path + "\" contains no checkpoint"));
  }
}

TEST(Resume, CheckpointsAtStepsAndEpochs) {
  const SharedDir dir;
  const RunResult ran =
      run(sgd(),
          {.max_epochs = 2, .folder = dir.path(), .name = "net", .save_every_n_steps = 2, .keep_checkpoints = 100}, -1);
  world().barrier();
  std::vector<std::int64_t> steps;
  for (const auto& name : checkpoint::list_checkpoints(dir.path() + "/net/checkpoints")) steps.push_back(name.step);
  std::sort(steps.begin(), steps.end());
  std::vector<std::int64_t> expected;
  for (std::int64_t step = 1; step <= ran.result.steps; ++step)
    if (step % 2 == 0 || step == ran.result.steps / 2 || step == ran.result.steps) expected.push_back(step);
  EXPECT_EQ(steps, expected);
  const RunResult none =
      run(sgd(), {.max_epochs = 1, .folder = dir.path(), .name = "none", .save_every_n_epochs = 0}, -1);
  EXPECT_TRUE(checkpoint::list_checkpoints(none.result.folder + "/checkpoints").empty());
}

/// After step 3, one file operation of the last rank fails because the disk is full.
struct FullDiskCallback : Callback {
  void on_step(FitContext& fit) override {
    if (fit.step() == 3 && fit.world().rank() == fit.world().size() - 1) fail_file_operation(0, ENOSPC);
  }
};

FitResult run_with_full_disk(Net& net, TrainerOptions options, const std::shared_ptr<Callback>& callback = nullptr) {
  options.progress_bar = options.model_summary = false;
  if (options.save_every_n_steps == 0) options.save_every_n_steps = 4;
  if (options.max_epochs < 0) options.max_epochs = 1;
  options.csv = options.tensorboard = false;  // so that the checkpoint fails
  torch::manual_seed(1);
  net = Net(sgd());
  torch::manual_seed(10 + static_cast<std::uint64_t>(world().rank()));
  Trainer trainer(options);
  trainer.add(std::make_shared<FullDiskCallback>());
  if (callback) trainer.add(callback);
  struct End {
    ~End() { end_file_operations(); }
  } end;
  return trainer.fit(net, loader_of());
}

TEST(Resume, TrainingContinuesWhenDiskIsFull) {
  for (const bool async : {false, true}) {
    const SharedDir dir;
    Net net(nullptr), expected(nullptr);
    const FitResult result = run_with_full_disk(net, {.folder = dir.path(), .name = "full", .save_async = async});
    EXPECT_EQ(result.reason, StopReason::kCompleted);
    const RunResult alone = run(sgd(), {.max_epochs = 1, .limit_val_batches = 0, .folder = ""}, -1);
    for (std::size_t i = 0; i < net->parameters().size(); ++i)
      EXPECT_TRUE(torch::equal(net->parameters()[i], alone.weights[i]));
    world().barrier();
    std::vector<std::int64_t> steps;
    for (const auto& name : checkpoint::list_checkpoints(dir.path() + "/full/checkpoints")) steps.push_back(name.step);
    EXPECT_THAT(steps, testing::Not(testing::Contains(4))) << "the checkpoint that found the disk full";
    EXPECT_EQ(steps.front(), result.steps);
  }
}

TEST(Resume, TrainingStopsWhenDiskIsFull) {
  const SharedDir dir;
  Net net(nullptr);
  const auto error = tests::thrown<base::SystemError>([&] {
    run_with_full_disk(
        net, {.folder = dir.path(), .name = "full", .save_async = false, .on_disk_error = DiskErrorPolicy::kStop});
  });
  EXPECT_EQ(error.cause(), base::Cause::kCkptWriteFailed);
  EXPECT_THAT(error.what(), HasSubstr("rank " + std::to_string(world().size() - 1)));
}

/// A job of its own, because the error closes the group.
TEST(ResumeFailures, TrainingStopsWhenAsyncSaveFindsDiskFull) {
  std::optional<TempDir> dir;
  if (world().rank() == 0) dir.emplace();
  const std::string folder = world().broadcast_bytes(dir ? dir->path() : "", 0);
  struct Count : Callback {
    void on_step(FitContext& fit) override {
      steps = fit.step();
      // 300 steps take 0.1 s, which the thread that saves may need to start on a busy machine.
      if (steps >= 300) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    std::int64_t steps = 0;
  };
  const auto count = std::make_shared<Count>();
  Net net(nullptr);
  const auto error = tests::thrown<base::Error>([&] {
    run_with_full_disk(net,
                       {.max_epochs = 10000,
                        .folder = folder,
                        .name = "full",
                        .save_every_n_steps = 300,
                        .save_every_n_epochs = 0,
                        .on_disk_error = DiskErrorPolicy::kStop},
                       count);
  });
  EXPECT_EQ(error.cause(), base::Cause::kCkptWriteFailed) << error.what();
  EXPECT_GE(count->steps, 300);
  EXPECT_LT(count->steps, 600) << "only the next save checked for the error";
}

TEST(Resume, BestWeightsAreKept) {
  const SharedDir dir;
  struct LossRecorder : Callback {
    void on_validation_end(FitContext&, const NamedValues& values) override { losses.push_back(values.back().second); }
    std::vector<double> losses;
  };
  const auto best = std::make_shared<ModelCheckpoint>(ModelCheckpointOptions{.top_k = 2});
  const auto recorder = std::make_shared<LossRecorder>();
  torch::manual_seed(1);
  Net net(sgd());
  Trainer trainer({.max_epochs = 6,
                   .ema = 0.5,
                   .folder = dir.path(),
                   .name = "net",
                   .progress_bar = false,
                   .model_summary = false});
  trainer.add(best);
  trainer.add(recorder);
  trainer.fit(net, loader_of(), exact_loader());
  world().barrier();
  EXPECT_THAT(names_in(dir.path() + "/net/best"), SizeIs(2));
  ASSERT_THAT(best->paths(), SizeIs(2));
  std::vector<double> sorted = recorder->losses;
  std::sort(sorted.begin(), sorted.end());
  Net loaded(sgd());
  checkpoint::load(loaded, best->best_path());
  Trainer again({.folder = "", .progress_bar = false, .model_summary = false});
  EXPECT_NEAR(again.validate(loaded, exact_loader()).back().second, sorted.front(), 1e-6)
      << "of the averaged weights, which were validated";
  world().barrier();
}

TEST(Resume, UserExceptionReportsStepAndSamples) {
  struct Failing : NetImpl {
    using NetImpl::NetImpl;
    at::Tensor training_step(Example& batch, StepLog& log) {
      if (log.epoch == 1 && log.batch == 2) throw std::invalid_argument("no such word");
      return loss(batch);
    }
  };
  auto net = std::make_shared<Failing>(sgd());
  Trainer trainer({.max_epochs = 2, .folder = "", .progress_bar = false, .model_summary = false});
  const auto per_epoch = static_cast<std::int64_t>(loader_of().batches_per_epoch());
  try {
    trainer.fit(net, loader_of());
    FAIL();
  } catch (const StepError& error) {
    EXPECT_THAT(error.what(),
                HasSubstr("training_step() of step " + std::to_string(per_epoch + 3) + " (epoch 2, batch 3, samples "));
    EXPECT_THAT(error.what(), HasSubstr("): no such word"));
    EXPECT_THROW(std::rethrow_if_nested(error), std::invalid_argument);
  }
}

/// Stops a training after step `stop_at`, or after its first epoch, and resumes it with other options. Returns the
/// warnings of rank 0, or the error.
std::string resume_with(const MakeOptimizers& before, const TrainerOptions& options, const MakeOptimizers& after,
                        const std::function<void(TrainerOptions&)>& change, std::int64_t batch_size = 4,
                        std::uint64_t seed = 3, std::int64_t stop_at = 3) {
  const SharedDir dir;
  TrainerOptions all = options;
  all.folder = dir.path(), all.max_epochs = stop_at < 0 ? 1 : 2;
  run(before, all, stop_at);
  all.max_epochs = 2, all.resume = "auto", all.progress_bar = all.model_summary = false;
  change(all);
  Net net(after);
  Trainer trainer(all);
  StepCounter drawn;
  trainer.register_for_checkpointing("drawn", drawn);
  trainer.add(std::make_shared<EarlyStopping>(EarlyStoppingOptions{.patience = 100}));
  ::testing::internal::CaptureStderr();
  try {
    trainer.fit(net, data::make_loader(52, sample, world(), {.batch_size = batch_size, .seed = seed}), exact_loader());
  } catch (const base::UsageError& error) {
    ::testing::internal::GetCapturedStderr();
    return error.what();
  }
  return world().broadcast_bytes(::testing::internal::GetCapturedStderr(), 0);
}

std::size_t count_of(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(Resume, OtherSettingsAreOneWarningEach) {
  const auto same = [](TrainerOptions&) {};
  EXPECT_EQ(count_of(resume_with(sgd(), {.seed = 5}, sgd(), same), "warning:"), 0u);
  const std::string all = resume_with(
      sgd(), {.clip_norm = 1, .seed = 5}, sgd(),
      [](TrainerOptions& options) {
        options.accumulate_grad_batches = 2, options.clip_norm = 0, options.clip_value = 3, options.seed = {};
      },
      /*batch_size=*/2);
  for (const char* part : {"\"loader.batch_size\" is 2, and was 4", "\"accumulate_grad_batches\" is 2, and was 1",
                           "\"clip_norm\" is 0.0, and was 1.0", "\"clip_value\" is 3.0, and was 0.0",
                           "\"seed\" is \"none\", and was \"5\""})
    EXPECT_EQ(count_of(all, part), 1u) << part << " in " << all;
  EXPECT_EQ(count_of(all, "warning:"), 5u) << all;
}

TEST(Resume, OtherOptimizerOptionsAreAWarningAndAnotherClassAnError) {
  const auto same = [](TrainerOptions&) {};
  const auto with = [](double lr, double momentum) -> MakeOptimizers {
    return [=](torch::nn::Module&, TrainingSetup& setup) -> std::vector<OptimizerConfig> {
      return {
          {std::make_shared<torch::optim::SGD>(setup.parameters(), torch::optim::SGDOptions(lr).momentum(momentum))}};
    };
  };
  const std::string plain = resume_with(with(0.1, 0.9), {}, with(0.2, 0.9), same);
  EXPECT_THAT(plain, HasSubstr("\"optimizer.group.0.lr\" is 0.2, and was 0.1"));
  EXPECT_THAT(plain, HasSubstr("goes on with 0.1"));
  EXPECT_EQ(count_of(plain, "warning:"), 1u) << plain;
  EXPECT_THAT(resume_with(with(0.1, 0.9), {}, torch_adam(), same),
              HasSubstr("the setting \"optimizer\" is \"torch::optim::AdamW\"; expected \"torch::optim::SGD\""));
}

TEST(Resume, AddedAveragesStartFromTheCheckpoint) {
  const std::string added = resume_with(sgd(), {}, sgd(), [](TrainerOptions& options) { options.ema = 0.9; });
  EXPECT_THAT(added, HasSubstr("\"ema\" is 0.9, and was 0.0"));
  EXPECT_THAT(added, HasSubstr("has no state of ema, which starts without saved state"));
  EXPECT_EQ(count_of(added, "warning:"), 2u) << added;
  const std::string removed = resume_with(sgd(), {.ema = 0.9}, sgd(), [](TrainerOptions& options) { options.ema = 0; });
  EXPECT_THAT(removed, HasSubstr("\"ema\" is 0.0, and was 0.9"));
  EXPECT_THAT(removed, HasSubstr("has state of \"ema\", which this training does not have; it is ignored"));
}

TEST(Resume, AddedAveragesAreSaved) {
  const SharedDir dir;
  TrainerOptions options{.max_epochs = 2, .folder = dir.path()};
  const auto latest_after = [&](std::int64_t step) {
    const std::string folder = run(sgd(), options, step).result.folder;
    return checkpoint::Checkpointer(world(), folder + "/checkpoints").latest().value();
  };
  const auto tensor = [](const checkpoint::SavedCheckpoint& from, const std::string& part, const std::string& name) {
    return checkpoint::value_of<at::Tensor>(from.read(part), name);
  };
  const auto before = latest_after(3);
  options.resume = "auto", options.ema = 0.75;
  const auto after = latest_after(4);
  for (const char* const name : {"first.weight", "norm.bias"})
    EXPECT_TRUE(torch::allclose(tensor(after, "ema", name),
                                0.75 * tensor(before, "model", name) + 0.25 * tensor(after, "model", name)))
        << name;
  ::testing::internal::CaptureStderr();
  latest_after(5);
  EXPECT_EQ(::testing::internal::GetCapturedStderr().find("ema"), std::string::npos) << "they have a state now";
}

TEST(Resume, AnotherOrderOfSamplesInsideAnEpochIsAnError) {
  const auto same = [](TrainerOptions&) {};
  EXPECT_THAT(resume_with(sgd(), {}, sgd(), same, 4, /*seed=*/8),
              HasSubstr("the setting \"loader.seed\" is 8; expected 3"));
  const std::string at_end = resume_with(sgd(), {}, sgd(), same, 4, /*seed=*/8, /*stop_at=*/-1);
  EXPECT_THAT(at_end, HasSubstr("\"loader.seed\" is 8, and was 3"));
}

TEST(Resume, NonFiniteMetricIsReportedWithStepAndSamples) {
  struct Broken : NetImpl {
    using NetImpl::NetImpl;
    at::Tensor training_step(Example& batch, StepLog& log) {
      log.log("odd", log.batch == 1 && world().rank() == 0 ? std::nan("") : 1.0);
      return loss(batch);
    }
  };
  auto net = std::make_shared<Broken>(sgd());
  Trainer trainer({.max_epochs = 2, .folder = "", .progress_bar = false, .model_summary = false});
  testing::internal::CaptureStderr();
  trainer.fit(net, loader_of());
  const std::string output = testing::internal::GetCapturedStderr();
  if (world().rank() == 0) {
    EXPECT_THAT(
        output,
        HasSubstr(
            "NONFINITE odd is infinite or NaN on rank 0 since training_step() of step 2 (epoch 1, batch 2, samples "));
    EXPECT_EQ(output.find("NONFINITE"), output.rfind("NONFINITE")) << "more than once: " << output;
  } else {
    EXPECT_EQ(output.find("NONFINITE"), std::string::npos) << output;
  }
}

}  // namespace
}  // namespace lockstep::tests::trainer_resume_test
