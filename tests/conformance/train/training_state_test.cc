// Tests that TrainingState saves and restores every kind of member, and what it refuses to resume.
#include "lockstep/train/training_state.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lockstep/amp/grad_scaler.h"
#include "lockstep/base/error.h"
#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/optim/adam.h"
#include "lockstep/optim/ema.h"
#include "lockstep/optim/schedules/reduce_lr_on_plateau.h"
#include "lockstep/optim/schedules/scheduler.h"
#include "tests/conformance/train/resumable.h"
#include "tests/support/shared_dir.h"
#include "tests/support/temp_dir.h"

namespace lockstep::tests::training_state_test {
namespace {

using checkpoint::StateDict;
using testing::HasSubstr;
using training::TrainingState;
using training::TrainingStateOptions;

std::string error_of(const std::function<void()>& action) { return tests::message_of<base::UsageError>(action); }

/// A training with every kind of member. Dropout draws random numbers, which differ on each rank.
struct Training {
  Training(comm::Group group, const std::string& folder, std::uint64_t seed, bool is_fused)
      : state(group, folder, {.settings = {{"fused", is_fused}}}) {
    torch::manual_seed(seed);
    net = Net(MakeOptimizers());
    model.emplace(net, group, ddp::DdpOptions{.bucket_layout = state.bucket_layout("ddp")});
    ema.emplace(*net, optim::EmaOptions{.decay = 0.9});
    if (is_fused)
      fused.emplace(*model, optim::AdamWOptions{.lr = 0.01});
    else
      plain.emplace(net->parameters(), torch::optim::AdamWOptions(0.01));
    schedule.emplace(optimizer(), optim::cosine_decay({.steps = 100}));
    plateau.emplace(optimizer());
    loader.emplace(data::make_loader(52, sample, group, {.batch_size = 4, .seed = 3}));
    torch::manual_seed(seed + static_cast<std::uint64_t>(group.rank()));
    state.add("model", net).add("ddp", *model).add("ema", *ema).add("scaler", scaler).add("schedule", *schedule);
    state.add("plateau", *plateau).add("loader", *loader).add("best", best).add("count", count).add("note", note);
    state.add("done", done).add("history", history).add_each_rank("drawn", drawn).add_random_state();
    if (fused)
      state.add("optimizer", *fused);
    else
      state.add("optimizer", *plain, *net);
    resumed = state.resume();
  }
  torch::optim::Optimizer& optimizer() {
    if (fused) return *fused;
    return *plain;
  }
  /// Trains at most `steps` steps of epoch 1, from the loader's position, and saves at the end.
  void train(int steps, bool finished = false) {
    std::int64_t step = state.step();
    for (auto& batch : loader->epoch(1)) {
      optimizer().zero_grad();
      scaler.scale(net->loss(batch)).backward();
      scaler.step(optimizer());
      scaler.update();
      schedule->step();
      plateau->step(1.0 / static_cast<double>(step + 1));
      ema->update();
      best = 0.5 * static_cast<double>(++step);
      ++count, note += "x", done = !done, drawn.count += state_rank() + 1;
      history = at::full({2}, static_cast<double>(step));
      if (--steps == 0) break;
    }
    state.save_async(step, {.finished = finished});
    state.wait();
  }
  std::int64_t state_rank() const { return world().rank(); }

  TrainingState state;
  Net net{nullptr};
  std::optional<ddp::DistributedDataParallel> model;
  std::optional<optim::Ema> ema;
  std::optional<optim::AdamW> fused;
  std::optional<torch::optim::AdamW> plain;
  std::optional<optim::Scheduler> schedule;
  std::optional<optim::ReduceLROnPlateau> plateau;
  std::optional<data::Loader<data::Example>> loader;
  amp::GradScaler scaler{{.init_scale = 8, .growth_interval = 2}};
  double best = 0;
  std::int64_t count = 0;
  std::string note;
  bool done = false, resumed = false;
  at::Tensor history = at::zeros({2});
  StepCounter drawn;
};

void expect_same_state(const StateDict& got, const StateDict& expected, const std::string& name) {
  ASSERT_EQ(got.size(), expected.size()) << name;
  for (const auto& [key, value] : expected) {
    ASSERT_TRUE(got.contains(key)) << name << " " << key;
    const auto compare = [&]<typename T>(const T& want) {
      const T* const have = std::get_if<T>(&got.at(key));
      ASSERT_NE(have, nullptr) << name << " " << key;
      if constexpr (std::is_same_v<T, at::Tensor>)
        EXPECT_TRUE(torch::equal(*have, want)) << name << " " << key;
      else
        EXPECT_EQ(*have, want) << name << " " << key;
    };
    std::visit(compare, value);
  }
}

TEST(TrainingState, EveryMemberResumesBitEqual) {
  for (const bool is_fused : {false, true}) {
    const SharedDir dir;
    const std::string whole = dir.path() + "/whole", stopped = dir.path() + "/stopped";
    {
      Training expected(world(), whole, 1, is_fused);
      EXPECT_FALSE(expected.resumed);
      expected.train(5, true);
    }
    Training(world(), stopped, 1, is_fused).train(3);
    Training again(world(), stopped, 77, is_fused);
    EXPECT_TRUE(again.resumed);
    EXPECT_FALSE(again.state.is_finished());
    EXPECT_EQ(again.state.step(), 3);
    again.train(2, true);
    // Compares all files of the last checkpoints, which also contain the random state after the last step.
    const auto get = [](const std::string& folder) {
      return checkpoint::Checkpointer(world(), folder).latest().value();
    };
    const checkpoint::SavedCheckpoint one = get(whole), other = get(stopped);
    EXPECT_EQ(one.part_names(world().rank()), other.part_names(world().rank()));
    for (const std::string& part : one.part_names(world().rank()))
      expect_same_state(other.read(part, world().rank()), one.read(part, world().rank()), part);
    EXPECT_EQ(again.note, "xxxxx");
    EXPECT_EQ(again.count, 5);
    EXPECT_EQ(again.best, 2.5);
    EXPECT_TRUE(again.done);
    EXPECT_EQ(again.history[0].item<double>(), 5);
    EXPECT_EQ(again.drawn.count, 5 * (world().rank() + 1));
    EXPECT_TRUE(TrainingState(world(), stopped, {.settings = {{"fused", is_fused}}}).is_finished());
  }
}

TEST(TrainingState, ResumesWithAnotherNumberOfRanks) {
  const SharedDir dir;
  comm::Group alone = world().split(world().rank(), 0);
  const std::string folder = dir.path() + "/one";
  if (world().rank() == 0) {
    StepCounter drawn;
    drawn.count = 42;
    TrainingState state(alone, folder);
    state.add_each_rank("drawn", drawn).add_random_state();
    EXPECT_FALSE(state.resume());
    state.save(5);
  }
  world().barrier();
  StepCounter drawn;
  torch::manual_seed(9);
  {
    TrainingState state(world(), folder);
    state.add_each_rank("drawn", drawn).add_random_state();
    EXPECT_TRUE(state.resume());
    EXPECT_EQ(state.step(), 5);
    EXPECT_EQ(drawn.count, 42);  // that of rank 0
    drawn.count = world().rank();
    state.save(6);
  }
  const at::Tensor random = torch::randint(0, 1 << 30, {4});
  const std::string mine(static_cast<const char*>(random.const_data_ptr()), random.nbytes());
  const auto all = world().all_gather_bytes(mine);
  EXPECT_EQ(std::set<std::string>(all.begin(), all.end()).size(), all.size()) << "new ranks derive their own state";
  if (world().rank() == 0) {
    TrainingState state(alone, folder);
    state.add_each_rank("drawn", drawn).add_random_state();
    EXPECT_TRUE(state.resume());
    EXPECT_EQ(drawn.count, 0);
    EXPECT_TRUE(torch::equal(torch::randint(0, 1 << 30, {4}), random)) << "rank 0 continues";
  }
  world().barrier();
}

/// Saves a checkpoint with the members "a" and "b" and two settings.
void save_two(const std::string& folder) {
  StepCounter a, b;
  TrainingState state(world(), folder, {.settings = {{"batch_size", std::int64_t{64}}, {"precision", "32"}}});
  state.add("a", a).add("b", b);
  EXPECT_FALSE(state.resume());
  state.save(3);
}

TEST(TrainingState, RefusesAnotherSetting) {
  const SharedDir dir;
  save_two(dir.path() + "/two");
  const auto error_with = [&](const StateDict& settings) {
    StepCounter a, b;
    a.count = 7;
    const std::string error = error_of([&] {
      TrainingState state(world(), dir.path() + "/two", {.settings = settings});
      state.add("a", a).add("b", b).resume();
    });
    return error + (a.count == 7 ? "" : " and changed");
  };
  EXPECT_THAT(error_with({{"batch_size", std::int64_t{128}}, {"precision", "32"}}),
              HasSubstr("the setting \"batch_size\" is 128; expected 64, as in the checkpoint " + dir.path()));
  EXPECT_THAT(error_with({{"batch_size", 64.0}, {"precision", "32"}}),
              HasSubstr("\"batch_size\" is 64.0; expected 64, as"));
  EXPECT_THAT(error_with({{"precision", "32"}}), HasSubstr("\"batch_size\" is missing; expected 64"));
  EXPECT_THAT(error_with({{"batch_size", std::int64_t{64}}, {"precision", "32"}, {"lr", 0.1}}),
              HasSubstr("\"lr\" is 0.1; expected no such setting"));
  EXPECT_THAT(error_with({{"lr", at::zeros({1})}}), HasSubstr("\"lr\" is a tensor"));
  EXPECT_EQ(error_with({{"batch_size", std::int64_t{64}}, {"precision", "32"}}), " and changed");
}

TEST(TrainingState, AddedSettingsAreAWarningOrAnError) {
  const SharedDir dir;
  using training::SettingRule;
  const auto resume = [&](std::int64_t batch, double lr, const std::string& optimizer) {
    StepCounter a;
    ::testing::internal::CaptureStderr();
    std::string text = error_of([&] {
      TrainingState state(world(), dir.path() + "/a");
      state.add("a", a).add_setting("batch", batch, SettingRule::kUsesNew);
      state.add_setting("lr", lr, SettingRule::kUsesSaved).add_setting("class", optimizer, SettingRule::kMustMatch);
      if (!state.resume()) state.save(1);
    });
    return text + "\n" + ::testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(resume(64, 0.1, "SGD"), "\n");
  EXPECT_EQ(resume(64, 0.1, "SGD"), "\n");
  EXPECT_THAT(resume(64, 0.1, "Adam"), HasSubstr("the setting \"class\" is \"Adam\"; expected \"SGD\", as in"));
  const std::string both = resume(32, 0.5, "SGD");
  const bool is_first = world().rank() == 0;
  EXPECT_EQ(both.find("\"batch\" is 32, and was 64 in the checkpoint " + dir.path()) != std::string::npos, is_first)
      << both;
  EXPECT_EQ(both.find("the training goes on with 32") != std::string::npos, is_first) << both;
  EXPECT_EQ(both.find("\"lr\" is 0.5, and was 0.1") != std::string::npos, is_first) << both;
  EXPECT_EQ(both.find("the training goes on with 0.1") != std::string::npos, is_first) << both;
  EXPECT_EQ(std::count(both.begin(), both.end(), '\n'), is_first ? 3 : 1) << "one line per difference: " << both;
  TrainingState state(world(), "");
  state.add_setting("batch", std::int64_t{1}, SettingRule::kUsesNew);
  EXPECT_THAT(error_of([&] { state.add_setting("batch", 1.0, SettingRule::kUsesNew); }), HasSubstr("already added"));
  EXPECT_THAT(error_of([&] { state.add_setting("b", at::ones({1}), SettingRule::kUsesNew); }), HasSubstr("a tensor"));
}

TEST(TrainingState, SavesTheSettingsWithWhichTheTrainingGoesOn) {
  const SharedDir dir;
  using training::SettingRule;
  const auto resume_and_save = [&](std::int64_t batch, double lr) {
    StepCounter a;
    ::testing::internal::CaptureStderr();
    TrainingState state(world(), dir.path() + "/a");
    state.add("a", a).add_setting("batch", batch, SettingRule::kUsesNew).add_setting("lr", lr, SettingRule::kUsesSaved);
    state.resume();
    state.save(state.step() + 1);
    return ::testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(resume_and_save(64, 0.1), "");
  const std::string changed = resume_and_save(32, 0.5);
  EXPECT_EQ(std::count(changed.begin(), changed.end(), '\n'), world().rank() == 0 ? 2 : 0) << changed;
  EXPECT_EQ(resume_and_save(32, 0.1), "") << "the batch that the program changed, and the lr that it could not change";
}

/// A loop of the program's own, as the header of TrainingState shows it. Returns the number of batches it has trained.
int train_two_epochs(const std::string& folder, bool marks_the_end, int stop_after = 1000) {
  TrainingState state(world(), folder);
  if (state.is_finished()) return 0;
  auto loader = data::make_loader(24, sample, world(), {.batch_size = 2, .seed = 3});
  state.add("loader", loader).resume();
  int trained = 0;
  std::int64_t step = state.step();
  for (const std::uint64_t epoch : loader.remaining_epochs(2)) {
    for ([[maybe_unused]] auto& batch : loader.epoch(epoch)) {
      ++trained, ++step;
      if (trained == stop_after) {
        state.save(step);
        return trained;
      }
    }
    state.save(step);
  }
  if (marks_the_end) state.save(step, {.finished = true});
  return trained;
}

TEST(TrainingState, ACompleteTrainingTrainsNothingMore) {
  const int per_epoch = (24 / 2 + world().size() - 1) / world().size();
  for (const bool marks_the_end : {true, false}) {
    const SharedDir dir;
    for (const int trained : {2 * per_epoch, 0, 0})
      EXPECT_EQ(train_two_epochs(dir.path() + "/run", marks_the_end), trained) << marks_the_end;
  }
  for (const int first : {1, per_epoch, per_epoch + 1}) {
    const SharedDir dir;
    EXPECT_EQ(train_two_epochs(dir.path() + "/run", true, first), first);
    EXPECT_EQ(train_two_epochs(dir.path() + "/run", true), 2 * per_epoch - first);
  }
}

TEST(TrainingState, ResumeRefusesACompleteTraining) {
  const SharedDir dir;
  StepCounter a;
  {
    TrainingState state(world(), dir.path() + "/a");
    state.add("a", a);
    EXPECT_FALSE(state.resume());
    state.save(3, {.finished = true});
  }
  a.count = 7;
  const auto resume = [&](const training::ResumeOptions& options) {
    return error_of([&] { TrainingState(world(), dir.path() + "/a").add("a", a).resume(options); });
  };
  EXPECT_THAT(resume({}), HasSubstr("the training is complete: " + dir.path() + "/a/00000001-step-3 is its last"));
  EXPECT_EQ(a.count, 7);
  EXPECT_EQ(resume({.train_on = true}), "");
  EXPECT_EQ(a.count, 0);
}

TEST(TrainingState, UnknownValuesAreNamed) {
  const SharedDir dir;
  double best = 1.5;
  std::int64_t count = 3;
  StepCounter a;
  {
    TrainingState state(world(), dir.path() + "/a");
    state.add("a", a).add("best", best).add("count", count).resume();
    state.save(1);
  }
  using Names = std::vector<std::string>;
  const auto unknown_with = [&](bool has_best, bool has_count, const training::ResumeOptions& options) {
    TrainingState state(world(), dir.path() + "/a");
    state.add("a", a);
    if (has_best) state.add("best", best);
    if (has_count) state.add("count", count);
    state.resume(options);
    return state.unknown_parts();
  };
  EXPECT_EQ(unknown_with(true, true, {}), Names());
  EXPECT_EQ(unknown_with(true, false, {.allow_unknown = true}), Names({"count"}));
  EXPECT_EQ(unknown_with(false, false, {.allow_unknown = true}), Names({"best", "count"}));
  EXPECT_THAT(error_of([&] { unknown_with(false, true, {}); }), HasSubstr("has state of \"best\", which is not a"));
  EXPECT_THAT(error_of([&] { unknown_with(false, false, {}); }), HasSubstr("has state of \"best\", which is not a"));
}

TEST(TrainingState, RefusesMissingAndUnknownMembers) {
  const SharedDir dir;
  save_two(dir.path() + "/two");
  const TrainingStateOptions options{.settings = {{"batch_size", std::int64_t{64}}, {"precision", "32"}}};
  const auto error_with = [&](const std::vector<std::string>& names, const training::ResumeOptions& resume = {}) {
    StepCounter counter;
    return error_of([&] {
      TrainingState state(world(), dir.path() + "/two", options);
      for (const std::string& name : names) state.add(name, counter);
      state.resume(resume);
    });
  };
  EXPECT_EQ(error_with({"a", "b"}), "");
  EXPECT_THAT(error_with({"a", "b", "c"}), HasSubstr("has no state of \"c\"; expected the state of all members"));
  EXPECT_THAT(error_with({"a"}), HasSubstr("has state of \"b\", which is not a member"));
  EXPECT_EQ(error_with({"a"}, {.allow_unknown = true}), "");
  EXPECT_THAT(error_with({"a", "a"}), HasSubstr("\"a\" was already added"));
  for (const char* name : {"", "a b", "training", "values"})
    EXPECT_THAT(error_with({name}), HasSubstr("the name is \"" + std::string(name) + "\"; expected"));
  // Optional members, and members that are added after resume().
  StepCounter a, b;
  a.count = 5;
  TrainingState state(world(), dir.path() + "/two", options);
  bool loaded = false;
  state.add("c", {.state_dict = [] { return StateDict(); },
                  .load_state_dict = [&](const StateDict&) { loaded = true; },
                  .optional = true});
  EXPECT_TRUE(state.resume({.allow_unknown = true}));
  EXPECT_FALSE(loaded);
  state.add("a", a);
  EXPECT_EQ(a.count, 0);
  EXPECT_THAT(error_of([&] { state.resume(); }), HasSubstr("called twice"));
}

TEST(TrainingState, RefusesANewerFormat) {
  const SharedDir dir;
  checkpoint::CheckpointParts parts;
  if (world().rank() == 0) parts["training"] = {{"format_version", std::int64_t{2}}, {"finished", false}};
  checkpoint::Checkpointer(world(), dir.path() + "/new").save(1, parts);
  EXPECT_THAT(error_of([&] { TrainingState(world(), dir.path() + "/new"); }),
              HasSubstr("has format version 2; expected at most 1"));
}

TEST(TrainingState, RefusesAnotherModelAndChangesNothing) {
  const SharedDir dir;
  {
    Mlp net;
    TrainingState state(world(), dir.path() + "/net");
    state.add("model", net);
    state.save(1);
  }
  torch::nn::Sequential other(torch::nn::Linear(3, 4));
  const at::Tensor before = other->parameters()[0].detach().clone();
  TrainingState state(world(), dir.path() + "/net");
  state.add("model", other);
  EXPECT_THAT(error_of([&] { state.resume(); }), HasSubstr("of \"model\" is missing"));
  EXPECT_TRUE(torch::equal(other->parameters()[0], before));
}

TEST(TrainingState, ChecksAllTensorsOfAModelBeforeItChangesOne) {
  using torch::nn::Linear, torch::nn::Sequential;
  const SharedDir dir;
  const auto resume = [&](Sequential net) {
    const at::Tensor before = net->parameters()[0].detach().clone();
    TrainingState state(world(), dir.path() + "/net");
    state.add("model", net);
    const std::string error = error_of([&] { state.resume(); });
    EXPECT_TRUE(torch::equal(net->parameters()[0], before)) << error;
    return error;
  };
  {
    Sequential net(Linear(3, 4), Linear(4, 2));
    TrainingState state(world(), dir.path() + "/net");
    state.add("model", net);
    state.save(1);
  }
  EXPECT_THAT(resume(Sequential(Linear(3, 4), Linear(4, 2), Linear(2, 2))),
              HasSubstr("\"2.bias\" of \"model\" is missing"));
  EXPECT_THAT(resume(Sequential(Linear(3, 4), Linear(4, 5))),
              HasSubstr("\"1.bias\" of \"model\" has another shape or dtype"));
  EXPECT_THAT(resume(Sequential(Linear(3, 4))), HasSubstr("\"1.bias\" of \"model\" is unexpected"));
}

TEST(TrainingState, ResumesFromAnotherDirectory) {
  const SharedDir dir;
  save_two(dir.path() + "/run/checkpoints");
  const auto step_from = [&](const std::string& path) {
    return TrainingState(world(), "", {.resume_from = path}).step();
  };
  EXPECT_EQ(step_from(dir.path() + "/run/"), 3);
  EXPECT_EQ(step_from(dir.path() + "/run/checkpoints"), 3);
  EXPECT_EQ(step_from(dir.path() + "/run/checkpoints/00000001-step-3"), 3);
  EXPECT_THAT(error_of([&] { step_from(dir.path() + "/none"); }), HasSubstr("/none\" contains no checkpoint"));
  EXPECT_THAT(error_of([&] { TrainingState(world(), "").save(1); }), HasSubstr("the directory is \"\""));
}

}  // namespace
}  // namespace lockstep::tests::training_state_test
