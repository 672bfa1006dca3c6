#include "lockstep/checkpoint/checkpointer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "lockstep/base/error.h"
#include "lockstep/checkpoint/module_io.h"
#include "lockstep/comm/init.h"
#include "tests/support/temp_dir.h"

namespace lockstep::checkpoint {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;
using tests::message_of;
using tests::TempDir;

CheckpointParts parts_of(std::int64_t step) {
  return {{"model", {{"weight", torch::full({100}, static_cast<double>(step))}, {"bias", torch::ones({3})}}},
          {"trainer", {{"step", step}, {"loss", 0.5}}}};
}

void expect_checkpoint(const SavedCheckpoint& checkpoint, std::int64_t step) {
  EXPECT_EQ(checkpoint.step(), step);
  EXPECT_THAT(checkpoint.part_names(), ElementsAre("model", "trainer"));
  EXPECT_EQ(value_of<std::int64_t>(checkpoint.read("trainer"), "step"), step);
  EXPECT_TRUE(
      value_of<at::Tensor>(checkpoint.read("model"), "weight").equal(torch::full({100}, static_cast<double>(step))));
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.path().filename() != "LOCK") names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

// Flips a bit near the end of a file.
void damage(const std::string& path) {
  std::string text = tests::read_file(path);
  text[text.size() - 3] = static_cast<char>(text[text.size() - 3] ^ 16);
  std::ofstream(path, std::ios::binary) << text;
}

TEST(Checkpointer, SavesFindsAndKeepsCheckpoints) {
  const TempDir folder;
  Checkpointer checkpoints(comm::init(), folder / "runs/x");
  EXPECT_FALSE(checkpoints.latest());
  EXPECT_THAT(message_of<base::UsageError>([&] { checkpoints.load("auto"); }),
              HasSubstr("there is no complete checkpoint in"));
  for (const std::int64_t step : {10, 20, 30}) {
    const auto report = checkpoints.save(step, parts_of(step));
    EXPECT_GT(report.num_bytes, 400u);
    EXPECT_GE(report.duration.count(), 0);
    expect_checkpoint(*checkpoints.latest(), step);
    expect_checkpoint(SavedCheckpoint(report.path), step);
  }
  EXPECT_THAT(names_in(folder / "runs/x"), ElementsAre("00000002-step-20", "00000003-step-30", "LATEST"));
  EXPECT_EQ(tests::read_file(folder / "runs/x/LATEST"), "00000003-step-30\n");
  EXPECT_THAT(names_in(folder / "runs/x/00000003-step-30"),
              ElementsAre("MANIFEST.json", "model.safetensors", "trainer.json"));
  torch::nn::Linear net(torch::nn::LinearOptions(100, 3).bias(false));
  EXPECT_THAT(message_of<base::UsageError>([&] { load(net, folder / "runs/x/00000003-step-30/model.safetensors"); }),
              HasSubstr("with another shape (\"weight\" [100] in the file"))
      << "a module can be loaded from the file of a part with tensors only";
}

TEST(Checkpointer, LatestIsTheLastWrittenNotTheHighestStep) {
  const TempDir folder;
  Checkpointer checkpoints(comm::init(), folder.path());
  for (const std::int64_t step : {10, 20, 10}) checkpoints.save(step, parts_of(step));
  expect_checkpoint(*checkpoints.latest(), 10);
  EXPECT_THAT(names_in(folder.path()), ElementsAre("00000002-step-20", "00000003-step-10", "LATEST"));
  expect_checkpoint(checkpoints.load(folder / "00000002-step-20"), 20);
  EXPECT_THAT(message_of<base::UsageError>([&] { checkpoints.load("auto").read("missing"); }),
              HasSubstr("has no part \"missing\" of rank 0; expected one of model, trainer"));
}

TEST(Checkpointer, SkipsDamagedCheckpointWithWarning) {
  const TempDir folder;
  Checkpointer checkpoints(comm::init(), folder.path());
  for (const std::int64_t step : {10, 20}) checkpoints.save(step, parts_of(step));
  damage(folder / "00000002-step-20/model.safetensors");
  testing::internal::CaptureStderr();
  expect_checkpoint(*checkpoints.latest(), 10);
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              HasSubstr("CKPT_SKIPPED the checkpoint " + folder.path() +
                        "/00000002-step-20 is skipped: " + folder.path() + "/00000002-step-20/model.safetensors:"));
  EXPECT_THAT(message_of<base::FormatError>([&] { SavedCheckpoint(folder / "00000002-step-20").read("model"); }),
              HasSubstr("tensor \"weight\" is damaged"));
  EXPECT_THAT(message_of<base::UsageError>([&] { checkpoints.load(folder / "00000002-step-20"); }),
              HasSubstr("cannot load the checkpoint"));
  fs::resize_file(folder / "00000002-step-20/trainer.json", 3);
  checkpoints.save(30, parts_of(30));
  EXPECT_THAT(names_in(folder.path()),
              ElementsAre("00000001-step-10", "00000002-step-20", "00000003-step-30", "LATEST"))
      << "two complete checkpoints are kept";
  checkpoints.save(40, parts_of(40));
  EXPECT_THAT(names_in(folder.path()), ElementsAre("00000003-step-30", "00000004-step-40", "LATEST"));
}

TEST(Checkpointer, DamagedCheckpointsAreNotCountedWhenOlderOnesAreRemoved) {
  const TempDir folder;
  {
    Checkpointer checkpoints(comm::init(), folder.path(), {.keep = 3});
    for (const std::int64_t step : {10, 20, 30}) checkpoints.save(step, parts_of(step));
  }
  damage(folder / "00000003-step-30/model.safetensors");  // a flipped bit: names and sizes are as before
  Checkpointer checkpoints(comm::init(), folder.path());
  checkpoints.save(40, parts_of(40));
  EXPECT_THAT(names_in(folder.path()),
              ElementsAre("00000002-step-20", "00000003-step-30", "00000004-step-40", "LATEST"))
      << "two checkpoints are kept that are whole";
  damage(folder / "00000004-step-40/trainer.json");  // one that this object has written
  checkpoints.save(50, parts_of(50));
  EXPECT_THAT(names_in(folder.path()),
              ElementsAre("00000002-step-20", "00000003-step-30", "00000004-step-40", "00000005-step-50", "LATEST"));
  checkpoints.save(60, parts_of(60));
  EXPECT_THAT(names_in(folder.path()), ElementsAre("00000005-step-50", "00000006-step-60", "LATEST"));
}

TEST(Checkpointer, AFolderIsWrittenByOneTrainingAtATime) {
  const TempDir folder;
  comm::Group world = comm::init();
  auto checkpoints = std::make_unique<Checkpointer>(world, folder.path());
  checkpoints->save(10, parts_of(10));
  fs::rename(folder.write("new", "beta\nother\n4711\nrun\n0\n"), folder / "LOCK");  // as another host takes it over
  EXPECT_THAT(message_of<base::UsageError>([&] { checkpoints->save(20, parts_of(20)); }),
              HasSubstr("is in use by another training: process 4711 on beta, job run"));
  EXPECT_THAT(names_in(folder.path()), ElementsAre("00000001-step-10", "LATEST"));
  expect_checkpoint(*Checkpointer(world, folder.path()).latest(), 10);  // reading needs no lock
  checkpoints.reset();
  EXPECT_TRUE(fs::exists(folder / "LOCK")) << "the lock of the other training";
}

TEST(Checkpointer, FilesFollowTheUmask) {
  const TempDir folder;
  const mode_t before = ::umask(022);
  const std::string path = Checkpointer(comm::init(), folder / "runs/x").save(10, parts_of(10)).path;
  ::umask(before);
  for (const std::string& directory : {folder / "runs", folder / "runs/x", path})
    EXPECT_EQ(fs::status(directory).permissions(), fs::perms(0755)) << directory;
  for (const auto& file : fs::directory_iterator(path))
    EXPECT_EQ(file.status().permissions(), fs::perms(0644)) << file.path();
}

TEST(Checkpointer, DetectsEveryKindOfDamage) {
  const TempDir folder;
  Checkpointer checkpoints(comm::init(), folder.path());
  checkpoints.save(10, parts_of(10));
  const std::string latest = checkpoints.save(20, parts_of(20)).path, spare = folder / "spare";
  fs::copy(latest, spare, fs::copy_options::recursive);
  const auto restore_latest = [&] {
    fs::remove_all(latest);
    fs::copy(spare, latest, fs::copy_options::recursive);
  };
  for (const std::string file : {"MANIFEST.json", "model.safetensors", "trainer.json"})
    for (int how = 0; how < 3; ++how) {
      restore_latest();
      if (how == 0) damage(latest + "/" + file);
      if (how == 1) fs::remove(latest + "/" + file);
      if (how == 2) fs::resize_file(latest + "/" + file, fs::file_size(latest + "/" + file) - 1);
      expect_checkpoint(*checkpoints.latest(), 10);
    }
  // Intact files of another checkpoint.
  for (const std::string file : {"model.safetensors", "trainer.json"}) {
    restore_latest();
    fs::copy_file(folder / ("00000001-step-10/" + file), latest + "/" + file, fs::copy_options::overwrite_existing);
    EXPECT_THAT(message_of<base::FormatError>([&] { SavedCheckpoint(latest).read(file.substr(0, file.find('.'))); }),
                HasSubstr(file + ":0: the file is damaged or belongs to another checkpoint: its hash is "));
    expect_checkpoint(*checkpoints.latest(), 10);
  }
  restore_latest();
  expect_checkpoint(*checkpoints.latest(), 20);
}

TEST(Checkpointer, AsyncSaveWritesValuesAtTimeOfCall) {
  const TempDir folder;
  Checkpointer checkpoints(comm::init(), folder.path());
  EXPECT_FALSE(checkpoints.wait());
  CheckpointParts parts = parts_of(10);
  auto& weight = std::get<at::Tensor>(parts["model"]["weight"]);
  checkpoints.save_async(10, parts);
  weight.fill_(20);
  parts["trainer"]["step"] = std::int64_t{20};
  checkpoints.save_async(20, parts);
  weight.fill_(-1);
  const auto report = checkpoints.wait();
  ASSERT_TRUE(report);
  EXPECT_FALSE(checkpoints.in_flight());
  EXPECT_LE(report->stall, report->duration);
  EXPECT_FALSE(checkpoints.wait());
  expect_checkpoint(SavedCheckpoint(report->path), 20);
  expect_checkpoint(SavedCheckpoint(folder / "00000001-step-10"), 10);
}

TEST(Checkpointer, RejectsInvalidArguments) {
  const TempDir folder;
  comm::Group world = comm::init();
  EXPECT_THAT(message_of<base::UsageError>([&] { Checkpointer(world, folder.path(), {.keep = 1}); }),
              HasSubstr("CheckpointOptions.keep is 1; expected 2 or more"));
  EXPECT_THAT(message_of<base::UsageError>([&] { Checkpointer(world, ""); }), HasSubstr("the directory is \"\""));
  EXPECT_THAT(message_of<base::SystemError>([&] { Checkpointer(world, folder.write("file", "") + "/x"); }),
              HasSubstr("cannot create the directory"));
  Checkpointer checkpoints(world, folder / "x");
  EXPECT_THAT(message_of<base::UsageError>([&] { checkpoints.save(-1, {}); }),
              HasSubstr("checkpoint of step -1: rank 0: step is -1; expected 0 or more"));
  EXPECT_THAT(message_of<base::UsageError>([&] { checkpoints.save(1, {{"a/b", {}}}); }),
              HasSubstr("the part name is \"a/b\"; expected 1 to 64 characters of"));
  EXPECT_THAT(message_of<base::UsageError>([&] { checkpoints.save(1, {{"a", {{"u", at::Tensor()}}}}); }),
              HasSubstr("undefined tensor \"u\""));
  checkpoints.save_async(1, {{"a", {{"s", torch::ones({2, 2}).to_sparse()}}}});
  EXPECT_THAT(message_of<base::UsageError>([&] { checkpoints.save(2, {}); }),
              HasSubstr("checkpoint of step 1: rank 0: cannot save tensor \"s\""));
  EXPECT_TRUE(names_in(folder / "x").empty()) << "failed saves leave nothing behind";
  EXPECT_NO_THROW(checkpoints.save(2, {}));
}

}  // namespace
}  // namespace lockstep::checkpoint
