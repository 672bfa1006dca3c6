#include "lockstep/checkpoint/checkpointer.h"

#include <atomic>
#include <exception>
#include <thread>
#include <utility>

#include "lockstep/base/env.h"
#include "lockstep/base/log.h"
#include "lockstep/base/thread.h"
#include "lockstep/checkpoint/collective_save.h"
#include "lockstep/checkpoint/files/directory.h"
#include "lockstep/checkpoint/files/folder_lock.h"
#include "lockstep/checkpoint/staging_buffer.h"
#include "lockstep/comm/channel/deadlock_detector.h"
#include "lockstep/comm/group_access.h"

namespace lockstep::checkpoint {

struct Checkpointer::InFlight {
  std::thread thread;
  std::atomic<bool> done = false;
  SaveReport report;         // valid after `done`
  std::exception_ptr error;  // valid after `done`
};

Checkpointer::Checkpointer(const comm::Group& group, std::string folder, const CheckpointOptions& options)
    : group_(group),
      writer_group_(group_.split(0, group_.rank())),
      folder_(std::move(folder)),
      options_(options),
      verified_(std::make_unique<VerifiedCheckpoints>()),
      staging_(std::make_unique<StagingBuffer>()) {
  throw_if_any_failed(
      group_, "checkpoints in " + folder_, capture_exception([&] {
        if (options_.keep < 2)
          throw base::UsageError("CheckpointOptions.keep is " + std::to_string(options_.keep) + "; expected 2 or more");
        if (folder_.empty()) throw base::UsageError("the directory is \"\"; expected a path");
        if (group_.rank() == 0) files::create_directories(folder_);
      }));
}

Checkpointer::~Checkpointer() {
  if (!in_flight_) return;
  if (fork_guard_.is_copy_in_child()) {  // a child made by fork() does not have the thread
    in_flight_->thread.detach();
    return;
  }
  const auto busy = group_.busy("wait for a checkpoint");
  in_flight_->thread.join();  // bounded: by the group's timeouts and by the disk
  if (in_flight_->error)
    base::log_warning("the last checkpoint of save_async() was not written, and wait() was not called");
}

void Checkpointer::lock() {
  if (locked_) return;
  const auto busy = group_.busy("lock the directory of checkpoints");
  throw_if_any_failed(
      group_, "lock " + folder_, capture_exception([&] {
        if (group_.rank() != 0) return;
        const comm::JobStart start = comm::GroupAccess::job_start(group_);
        folder_lock_ = std::make_unique<files::FolderLock>(
            folder_, files::FolderLockOptions{.job = files::unique_job_name(start.job, base::Env::this_process()),
                                              .generation = start.generation});
      }));
  locked_ = true;
}

SaveRequest Checkpointer::request(std::int64_t step) const {
  return {
      .folder = folder_, .step = step, .keep = options_.keep, .lock = folder_lock_.get(), .verified = verified_.get()};
}

SaveReport Checkpointer::save(std::int64_t step, const CheckpointParts& mine) {
  const auto begin = std::chrono::steady_clock::now();
  wait();
  lock();
  const auto busy = group_.busy("save a checkpoint");
  SaveReport report = save_collective(group_, request(step), mine);
  report.stall = std::chrono::steady_clock::now() - begin;
  return report;
}

void Checkpointer::save_async(std::int64_t step, const CheckpointParts& mine) {
  const auto begin = std::chrono::steady_clock::now();
  wait();
  lock();
  auto async_save = std::make_unique<InFlight>();
  SaveRequest pending = request(step);
  CheckpointParts copy;
  pending.error = capture_exception([&] { copy = staging_->copy(mine); });
  async_save->report.stall = std::chrono::steady_clock::now() - begin;
  InFlight& running = *async_save;
  running.thread = base::start_thread([this, &running, pending = std::move(pending), copy = std::move(copy), begin] {
    const comm::channel::DeadlockDetector::BackgroundThread background_thread;  // only this thread uses writer_group_
    running.error = capture_exception([&] {
      const auto stall = running.report.stall;
      running.report = save_collective(writer_group_, pending, copy);
      running.report.stall = stall;
      running.report.duration = std::chrono::steady_clock::now() - begin;
    });
    running.done = true;
  });
  in_flight_ = std::move(async_save);
}

bool Checkpointer::in_flight() const { return in_flight_ && !in_flight_->done; }

std::optional<SaveReport> Checkpointer::wait() {
  if (!in_flight_) return std::nullopt;
  {
    const auto busy = group_.busy("wait for a checkpoint");
    in_flight_->thread.join();  // bounded: by the group's timeouts and by the disk
  }
  const auto async_save = std::exchange(in_flight_, nullptr);
  if (async_save->error) std::rethrow_exception(async_save->error);
  return async_save->report;
}

std::string Checkpointer::find_damage_together(const SavedCheckpoint& checkpoint) {
  const auto busy = group_.busy("verify a checkpoint");
  std::string mine;
  const auto size = static_cast<std::size_t>(group_.size());
  for (auto i = static_cast<std::size_t>(group_.rank()); i < checkpoint.manifest().files.size() && mine.empty();
       i += size)
    mine = checkpoint.find_damage(i, true);
  for (const auto& damage : group_.all_gather_bytes(mine, {.name = "verify a checkpoint"}))
    if (!damage.empty()) return damage;
  return "";
}

// Returns the same result on all ranks.
std::optional<SavedCheckpoint> Checkpointer::open(const std::string& path, std::string& reason) {
  std::optional<SavedCheckpoint> checkpoint;
  std::string mine;
  try {
    checkpoint.emplace(path);
  } catch (const base::Error& error) {
    mine = error.what();
  }
  for (const auto& damage : group_.all_gather_bytes(mine, {.name = "open a checkpoint"}))
    if (reason.empty()) reason = damage;
  VerifiedCheckpoints::FileStates states;
  if (reason.empty() && group_.rank() == 0) states = VerifiedCheckpoints::file_states(*checkpoint);
  if (reason.empty()) reason = find_damage_together(*checkpoint);
  if (reason.empty() && group_.rank() == 0) verified_->add(*checkpoint, std::move(states));
  return reason.empty() ? checkpoint : std::nullopt;
}

std::optional<SavedCheckpoint> Checkpointer::latest() {
  wait();
  // Rank 0 lists the checkpoints for all ranks.
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
    if (group_.rank() == 0) base::log_warning("CKPT_SKIPPED the checkpoint " + path + " is skipped: " + reason);
  }
  return std::nullopt;
}

SavedCheckpoint Checkpointer::load(const std::string& path) {
  if (path == "auto") {
    if (auto checkpoint = latest()) return std::move(*checkpoint);
    throw base::UsageError("cannot load the latest checkpoint: there is no complete checkpoint in " + folder_, "",
                           base::Cause::kBadFile);
  }
  wait();
  std::string reason;
  if (auto checkpoint = open(path, reason)) return std::move(*checkpoint);
  throw base::UsageError("cannot load the checkpoint " + path + ": " + reason, "", base::Cause::kBadFile);
}

}  // namespace lockstep::checkpoint
