#include "lockstep/checkpoint/checkpointer.h"

#include <atomic>
#include <exception>
#include <thread>
#include <utility>

#include "lockstep/base/log.h"
#include "lockstep/checkpoint/collective_save.h"
#include "lockstep/checkpoint/files/directory.h"
#include "lockstep/checkpoint/staging_buffer.h"
#include "lockstep/comm/channel/deadlock_detector.h"

namespace lockstep::checkpoint {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

struct Checkpointer::InFlight {
  std::thread thread;
  std::atomic<bool> done = false;
  SaveReport report;         // when it is done
  std::exception_ptr error;  // likewise
};

Checkpointer::Checkpointer(const comm::Group& group, std::string folder, const CheckpointOptions& options)
    : group_(group),
      writer_group_(group_.split(0, group_.rank())),
      folder_(std::move(folder)),
      options_(options),
      staging_(std::make_unique<StagingBuffer>()) {
  throw_if_any_failed(group_, "checkpoints in " + folder_, capture_exception([&] {
                        if (options_.keep < 2)
                          throw base::UsageError("CheckpointOptions.keep is " + std::to_string(options_.keep) +
                                                 "; allowed is 2 or more");
                        if (folder_.empty()) throw base::UsageError("the folder \"\"; allowed is a path");
                        if (group_.rank() == 0) create_directories(folder_);
                      }));
}

Checkpointer::~Checkpointer() {
  if (!in_flight_) return;
  const auto busy = group_.busy("wait for a checkpoint");
  in_flight_->thread.join();  // bounded: by the group's limits, and by the disk
  if (in_flight_->error) base::log_warning("a checkpoint that nobody waited for was not written");
}

SaveReport Checkpointer::save(std::int64_t step, const CheckpointParts& mine) {
  const auto begin = Clock::now();
  wait();
  const auto busy = group_.busy("save a checkpoint");
  SaveReport report = save_collective(group_, {.folder = folder_, .step = step, .keep = options_.keep}, mine);
  report.stall = Clock::now() - begin;
  return report;
}

void Checkpointer::save_async(std::int64_t step, const CheckpointParts& mine) {
  const auto begin = Clock::now();
  wait();
  auto async_save = std::make_unique<InFlight>();
  SaveRequest plan{.folder = folder_, .step = step, .keep = options_.keep};
  CheckpointParts copy;
  plan.error = capture_exception([&] { copy = staging_->copy(mine); });
  async_save->report.stall = Clock::now() - begin;
  InFlight& it = *async_save;
  it.thread = std::thread([this, &it, plan = std::move(plan), copy = std::move(copy), begin] {
    const comm::DeadlockDetector::BackgroundThread background_thread;  // writer_group_ is its alone
    it.error = capture_exception([&] {
      const auto stall = it.report.stall;
      it.report = save_collective(writer_group_, plan, copy);
      it.report.stall = stall;
      it.report.duration = Clock::now() - begin;
    });
    it.done = true;
  });
  in_flight_ = std::move(async_save);
}

bool Checkpointer::in_flight() const { return in_flight_ && !in_flight_->done; }

std::optional<SaveReport> Checkpointer::wait() {
  if (!in_flight_) return std::nullopt;
  {
    const auto busy = group_.busy("wait for a checkpoint");
    in_flight_->thread.join();  // bounded: by the group's limits, and by the disk
  }
  const auto async_save = std::exchange(in_flight_, nullptr);
  if (async_save->error) std::rethrow_exception(async_save->error);
  return async_save->report;
}

std::string Checkpointer::find_damage_together(const SavedCheckpoint& checkpoint) {
  const auto busy = group_.busy("look through a checkpoint");
  std::string mine;
  const auto size = static_cast<std::size_t>(group_.size());
  for (auto i = static_cast<std::size_t>(group_.rank()); i < checkpoint.manifest().files.size() && mine.empty();
       i += size)
    mine = checkpoint.complaint(i, true);
  for (const auto& complaint : group_.all_gather_bytes(mine, {.name = "look through a checkpoint"}))
    if (!complaint.empty()) return complaint;
  return "";
}

// The same answer on all ranks.
std::optional<SavedCheckpoint> Checkpointer::open(const std::string& path, std::string& reason) {
  std::optional<SavedCheckpoint> checkpoint;
  std::string mine;
  try {
    checkpoint.emplace(path);
  } catch (const base::Error& error) {
    mine = error.what();
  }
  for (const auto& complaint : group_.all_gather_bytes(mine, {.name = "open a checkpoint"}))
    if (reason.empty()) reason = complaint;
  if (reason.empty()) reason = find_damage_together(*checkpoint);
  return reason.empty() ? checkpoint : std::nullopt;
}

std::optional<SavedCheckpoint> Checkpointer::latest() {
  wait();
  // As rank 0 sees them.
  std::string names;
  std::exception_ptr error;
  if (group_.rank() == 0)
    error = capture_exception([&] {
      for (const CheckpointName& name : list_checkpoints(folder_)) names += to_text(name) + "\n";
    });
  throw_if_any_failed(group_, "checkpoints in " + folder_, error);
  names = group_.broadcast_bytes(names, 0, {.name = "list checkpoints"});
  for (std::size_t at = 0; at < names.size(); at = names.find('\n', at) + 1) {
    const std::string path = folder_ + "/" + names.substr(at, names.find('\n', at) - at);
    std::string reason;
    auto checkpoint = open(path, reason);
    if (checkpoint) return checkpoint;
    if (group_.rank() == 0) base::log_warning("CKPT_SKIPPED the checkpoint " + path + " is passed over: " + reason);
  }
  return std::nullopt;
}

SavedCheckpoint Checkpointer::load(const std::string& path) {
  if (path == "auto") {
    if (auto checkpoint = latest()) return std::move(*checkpoint);
    throw base::UsageError("there is no whole checkpoint in " + folder_, "", base::Cause::kBadFile);
  }
  wait();
  std::string reason;
  if (auto checkpoint = open(path, reason)) return std::move(*checkpoint);
  throw base::UsageError("cannot load the checkpoint " + path + ": " + reason, "", base::Cause::kBadFile);
}

}  // namespace lockstep::checkpoint
