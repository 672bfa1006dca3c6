#include "lockstep/train/checkpoint_manager.h"

#include <chrono>
#include <filesystem>
#include <utility>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/checkpoint/collective_save.h"
#include "lockstep/job/identity/identity.h"
#include "lockstep/train/loggers/run_folder.h"

namespace lockstep::train {
namespace {

constexpr const char* kCheckpoints = "/checkpoints";

RunFolder run_folder(const TrainerOptions& options, int number) {
  const job::Identity identity = job::identify(base::Env::process());
  return open_run_folder({.folder = options.folder,
                          .name = (options.name.empty() ? program_name() : options.name) +
                                  (number == 1 ? "" : "." + std::to_string(number)),
                          .newest = options.resume == "auto",
                          .job = identity.job,
                          .generation = identity.generation});
}

/// The folder of checkpoints that `path` is, or has: "" when it has none.
std::string checkpoints_in(const std::string& path) {
  if (std::filesystem::is_directory(path + kCheckpoints)) return path + kCheckpoints;
  return checkpoint::list_checkpoints(path).empty() ? "" : path;
}

/// "runs/mnist/checkpoints/00000007-step-120/" without the last /.
std::string without_slash(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  return path;
}

}  // namespace

Keeper::Keeper(comm::Group world, const TrainerOptions& options, int number)
    : world_(std::move(world)), options_(options) {
  bool goes_on = false;
  if (!options_.folder.empty()) {
    RunFolder run;
    std::exception_ptr error;
    if (world_.rank() == 0) error = checkpoint::caught([&] { run = run_folder(options_, number); });
    checkpoint::agree(world_, "the folder of this run in " + options_.folder, error);
    const std::string said =
        world_.broadcast_bytes((run.goes_on ? "+" : "-") + run.path, 0, {.name = "the run's folder"});
    goes_on = said.front() == '+';
    folder_ = said.substr(1);
    checkpoints_ = std::make_unique<checkpoint::Checkpoints>(
        world_, folder_ + kCheckpoints, checkpoint::CheckpointOptions{.keep = options_.keep_checkpoints});
  }
  find(options_.resume, goes_on);
}

void Keeper::find(const std::string& resume, bool goes_on) {
  if (goes_on) found_ = checkpoints_->newest();
  if (found_) newest_step_ = found_->step();
  if (found_ || resume.empty() || resume == "auto") return;
  // As rank 0 sees it.
  const std::string path = without_slash(resume);
  std::string place;
  std::exception_ptr error;
  if (world_.rank() == 0)
    error = checkpoint::caught([&] {
      checkpoint::CheckpointName name;
      if (checkpoint::parse_name(std::filesystem::path(path).filename().string(), name))
        place = "=" + std::filesystem::absolute(path).parent_path().string();
      else
        place = "+" + checkpoints_in(path);
      if (place.size() == 1 || !std::filesystem::is_directory(place.substr(1)))
        throw base::UsageError("TrainerOptions.resume is \"" + resume +
                                   "\", where no checkpoint is; allowed is the path of one, or of the folder of a run",
                               "", base::Cause::kBadFile);
    });
  checkpoint::agree(world_, "where the training goes on", error);
  place = world_.broadcast_bytes(place, 0, {.name = "where to go on"});
  checkpoint::Checkpoints there(world_, place.substr(1));
  found_ = there.load(place.front() == '=' ? path : "auto");
}

bool Keeper::due_after_step(std::int64_t step) const {
  return checkpoints_ && options_.save_every_n_steps > 0 && step % options_.save_every_n_steps == 0;
}

bool Keeper::due_after_epoch(std::int64_t epochs) const {
  return checkpoints_ && options_.save_every_n_epochs > 0 && epochs % options_.save_every_n_epochs == 0;
}

double Keeper::save(std::int64_t step, const std::function<checkpoint::Parts()>& parts, bool durable) {
  if (!checkpoints_) return 0;
  const auto begin = std::chrono::steady_clock::now();
  in_flight_is_done();
  try {
    if (durable || !options_.save_async) {
      checkpoints_->save(step, parts());
    } else {
      checkpoints_->save_async(step, parts());
      flying_ = true;
    }
    newest_step_ = step;
  } catch (const base::SystemError& error) {
    lost(error);
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void Keeper::look() {
  if (flying_ && !checkpoints_->in_flight()) in_flight_is_done();
}

void Keeper::finish() { in_flight_is_done(); }

void Keeper::in_flight_is_done() {
  if (!std::exchange(flying_, false)) return;
  try {
    checkpoints_->wait();  // bounded: it has ended, or by the limits of the group and by the disk
  } catch (const base::SystemError& error) {
    newest_step_ = -1;
    // Other ranks may learn of it a step later: nobody waits for them, nor they for us.
    if (options_.on_disk_error == OnDiskError::kStop)
      world_.fail(base::CommError(error.cause(), "checkpoint", world_.rank(), -1, error.what(), error.hint()));
    lost(error);
  }
}

void Keeper::lost(const base::SystemError& error) {
  if (options_.on_disk_error == OnDiskError::kStop) throw base::SystemError(error);
  if (world_.rank() == 0)
    base::log_warning(std::string(name(error.cause())) + " " + error.what() +
                      "; the training goes on (TrainerOptions.on_disk_error), and the checkpoints before are whole");
}

bool Keeper::write_on_rank_0(const std::string& what, const std::function<void()>& write) {
  std::exception_ptr error;
  if (world_.rank() == 0) error = checkpoint::caught(write);
  try {
    checkpoint::agree(world_, what, error);
  } catch (const base::SystemError& said) {
    lost(said);
    return false;
  }
  return true;
}

}  // namespace lockstep::train
