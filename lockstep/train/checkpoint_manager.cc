#include "lockstep/train/checkpoint_manager.h"

#include <chrono>
#include <filesystem>
#include <utility>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/checkpoint/collective_save.h"
#include "lockstep/comm/group_access.h"
#include "lockstep/job/identity/identity.h"
#include "lockstep/train/loggers/run_directory.h"

namespace lockstep::training {
namespace {

constexpr const char* kCheckpointsDirectory = "/checkpoints";

RunDirectory run_directory(const TrainerOptions& options, int fit_number) {
  const job::Identity identity = job::identify(base::Env::this_process());
  return open_run_directory({.folder = options.folder,
                             .name = (options.name.empty() ? program_name() : options.name) +
                                     (fit_number == 1 ? "" : "." + std::to_string(fit_number)),
                             .resume_newest = options.resume == "auto",
                             .job = identity.job,
                             .generation = identity.generation});
}

/// Returns the directory of checkpoints that `path` is or contains; "" if there is none.
std::string find_checkpoints_directory(const std::string& path) {
  if (std::filesystem::is_directory(path + kCheckpointsDirectory)) return path + kCheckpointsDirectory;
  return checkpoint::list_checkpoints(path).empty() ? "" : path;
}

/// Removes the trailing / of a path such as "runs/mnist/checkpoints/00000007-step-120/".
std::string strip_trailing_slashes(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  return path;
}

}  // namespace

CheckpointManager::CheckpointManager(comm::Group world, const TrainerOptions& options, int fit_number)
    : world_(std::move(world)), options_(options) {
  bool is_resumed = false;
  if (!options_.folder.empty()) {
    RunDirectory run;
    std::exception_ptr error;
    if (world_.rank() == 0) error = checkpoint::capture_exception([&] { run = run_directory(options_, fit_number); });
    checkpoint::throw_if_any_failed(world_, "open the run directory in " + options_.folder, error);
    const std::string answer =
        world_.broadcast_bytes((run.is_resumed ? "+" : "-") + run.path, 0, {.name = "run directory"});
    is_resumed = answer.front() == '+';
    folder_ = answer.substr(1);
    checkpoints_ = std::make_unique<checkpoint::Checkpointer>(
        world_, folder_ + kCheckpointsDirectory, checkpoint::CheckpointOptions{.keep = options_.keep_checkpoints});
  }
  find_resume_checkpoint(options_.resume, is_resumed);
}

void CheckpointManager::find_resume_checkpoint(const std::string& resume, bool is_resumed) {
  if (is_resumed) resume_checkpoint_ = checkpoints_->latest();
  if (resume_checkpoint_) newest_step_ = resume_checkpoint_->step();
  if (resume_checkpoint_ || resume.empty() || resume == "auto") return;
  // Rank 0 decides: '=' and the parent of a checkpoint, or '+' and a directory of checkpoints.
  const std::string path = strip_trailing_slashes(resume);
  std::string location;
  std::exception_ptr error;
  if (world_.rank() == 0)
    error = checkpoint::capture_exception([&] {
      checkpoint::CheckpointName name;
      if (checkpoint::parse_checkpoint_name(std::filesystem::path(path).filename().string(), name))
        location = "=" + std::filesystem::absolute(path).parent_path().string();
      else
        location = "+" + find_checkpoints_directory(path);
      if (location.size() == 1 || !std::filesystem::is_directory(location.substr(1)))
        throw base::UsageError(
            "TrainerOptions.resume is \"" + resume +
                "\", which contains no checkpoint; expected the path of a checkpoint or of a run's directory",
            "", base::Cause::kBadFile);
    });
  checkpoint::throw_if_any_failed(world_, "find the checkpoint to resume from", error);
  location = world_.broadcast_bytes(location, 0, {.name = "resume path"});
  checkpoint::Checkpointer source(world_, location.substr(1));
  resume_checkpoint_ = source.load(location.front() == '=' ? path : "auto");
}

bool CheckpointManager::should_save_after_step(std::int64_t step) const {
  return checkpoints_ && options_.save_every_n_steps > 0 && step % options_.save_every_n_steps == 0;
}

bool CheckpointManager::should_save_after_epoch(std::int64_t epochs) const {
  return checkpoints_ && options_.save_every_n_epochs > 0 && epochs % options_.save_every_n_epochs == 0;
}

double CheckpointManager::save(std::int64_t step, const std::function<checkpoint::CheckpointParts()>& parts,
                               bool durable) {
  if (!checkpoints_) return 0;
  const auto begin = std::chrono::steady_clock::now();
  finish_in_flight_save();
  try {
    if (durable || !options_.save_async) {
      checkpoints_->save(step, parts());
    } else {
      checkpoints_->save_async(step, parts());
      in_flight_ = true;
    }
    newest_step_ = step;
  } catch (const base::SystemError& error) {
    handle_disk_error(error);
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void CheckpointManager::check_in_flight_save() {
  if (in_flight_ && !checkpoints_->in_flight()) finish_in_flight_save();
}

void CheckpointManager::wait_for_save() { finish_in_flight_save(); }

void CheckpointManager::finish_in_flight_save() {
  if (!std::exchange(in_flight_, false)) return;
  try {
    checkpoints_->wait();  // bounded: the save has finished, or by the timeouts of the group and by the disk
  } catch (const base::SystemError& error) {
    newest_step_ = -1;
    // Other ranks may observe the error a step later, so this rank fails the job without waiting for them.
    if (options_.on_disk_error == DiskErrorPolicy::kStop)
      comm::GroupAccess::fail(
          world_, base::CommError(error.cause(), "checkpoint", world_.rank(), -1, error.what(), error.hint()));
    handle_disk_error(error);
  }
}

void CheckpointManager::handle_disk_error(const base::SystemError& error) {
  if (options_.on_disk_error == DiskErrorPolicy::kStop) throw base::SystemError(error);
  if (world_.rank() == 0)
    base::log_warning(
        std::string(name(error.cause())) + " " + error.what() +
        "; the training continues (TrainerOptions.on_disk_error), and earlier checkpoints are still valid");
}

bool CheckpointManager::write_on_rank_0(const std::string& what, const std::function<void()>& write) {
  std::exception_ptr error;
  if (world_.rank() == 0) error = checkpoint::capture_exception(write);
  try {
    checkpoint::throw_if_any_failed(world_, what, error);
  } catch (const base::SystemError& failure) {
    handle_disk_error(failure);
    return false;
  }
  return true;
}

}  // namespace lockstep::training
