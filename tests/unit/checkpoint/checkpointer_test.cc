#include "lockstep/checkpoint/checkpointer.h"

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "lockstep/checkpoint/module_io.h"
#include "lockstep/comm/init.h"
#include "tests/support/faulty_files.h"
#include "tests/support/temp_dir.h"

namespace {

/// Called once, by the next save on rank 0: after it has begun and before it writes its files.
std::function<void()> during_next_save;

}  // namespace

/// Replaces the function of libc with which a save asks for the free space.
extern "C" int statvfs(const char* path, struct statvfs* space) noexcept {
  if (const auto action = std::exchange(during_next_save, nullptr)) action();
  static const auto original = reinterpret_cast<decltype(&::statvfs)>(::dlsym(RTLD_NEXT, "statvfs"));
  return original(path, space);
}

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

/// Records which files of a directory are opened.
class OpenedFiles {
 public:
  explicit OpenedFiles(const std::string& folder) : inotify_(::inotify_init1(IN_NONBLOCK | IN_CLOEXEC)) {
    EXPECT_GE(::inotify_add_watch(inotify_.get(), folder.c_str(), IN_OPEN), 0);
  }
  std::set<std::string> names() const {
    std::set<std::string> names;
    alignas(inotify_event) std::array<char, 4096> buffer{};
    for (ssize_t size = 0; (size = ::read(inotify_.get(), buffer.data(), buffer.size())) > 0;)
      for (const char* at = buffer.data(); at < buffer.data() + size;) {
        const auto* const event = reinterpret_cast<const inotify_event*>(at);
        if (event->len > 0) names.insert(event->name);
        at += sizeof(inotify_event) + event->len;
      }
    return names;
  }

 private:
  base::Fd inotify_;
};

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

TEST(Checkpointer, ATrainingThatHasLostItsFolderWritesNothing) {
  const TempDir folder;
  Checkpointer checkpoints(comm::init(), folder.path());
  checkpoints.save(10, parts_of(10));
  EXPECT_THAT(tests::read_file(folder / "LOCK"), testing::EndsWith("\n\n0\n")) << "no launcher: the job has no name";
  const auto take_over = [&] {  // as a later start of the job on another host does
    fs::rename(folder.write("new", "beta\nother\n4711\nrun\n1\n"), folder / "LOCK");
  };
  during_next_save = take_over;
  EXPECT_THAT(message_of<base::UsageError>([&] { checkpoints.save(20, parts_of(20)); }),
              HasSubstr("is in use by another training: process 4711 on beta, job run"));
  EXPECT_FALSE(during_next_save);
  EXPECT_THAT(names_in(folder.path()), ElementsAre("00000001-step-10", "LATEST")) << "a save that had begun";
  tests::record_file_operations();
  EXPECT_THAT(message_of<base::UsageError>([&] { checkpoints.save(30, parts_of(30)); }), HasSubstr("is in use by"));
  tests::end_file_operations();
  for (const std::string& operation : tests::file_operations())
    EXPECT_FALSE(operation.starts_with("pwrite")) << "a save that begins afterwards: " << operation;
}

TEST(Checkpointer, ACheckpointThatLatestHasVerifiedIsNotReadAgain) {
  const TempDir folder;
  const std::string first = Checkpointer(comm::init(), folder.path()).save(10, parts_of(10)).path;
  const auto read_by_a_save = [&](bool verifies_first) {
    Checkpointer checkpoints(comm::init(), folder.path());
    if (verifies_first) expect_checkpoint(*checkpoints.latest(), 10);
    const OpenedFiles opened(first);
    fs::remove_all(checkpoints.save(20, parts_of(20)).path);
    return opened.names();
  };
  EXPECT_THAT(read_by_a_save(false), ElementsAre("MANIFEST.json", "model.safetensors", "trainer.json"));
  EXPECT_THAT(read_by_a_save(true), ElementsAre("MANIFEST.json"));
}

TEST(Checkpointer, ACheckpointThatHasChangedSinceItWasVerifiedIsReadAgain) {
  const TempDir folder;
  Checkpointer checkpoints(comm::init(), folder.path());
  for (const std::int64_t step : {10, 20}) checkpoints.save(step, parts_of(step));
  expect_checkpoint(*checkpoints.latest(), 20);
  const std::string file = folder / "00000002-step-20/model.safetensors", copy = folder / "copy";
  fs::copy_file(file, copy);
  damage(copy);
  fs::rename(copy, file);  // another inode: the clock of the file system may not have advanced since the first save
  checkpoints.save(30, parts_of(30));
  EXPECT_THAT(names_in(folder.path()),
              ElementsAre("00000001-step-10", "00000002-step-20", "00000003-step-30", "LATEST"))
      << "that of step 20 does not count";
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
