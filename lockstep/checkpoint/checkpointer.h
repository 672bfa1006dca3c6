// Writes the checkpoints of a training run from all ranks, and finds the latest complete one.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "lockstep/base/process_owned.h"
#include "lockstep/checkpoint/saved_checkpoint.h"
#include "lockstep/checkpoint/stateful.h"
#include "lockstep/comm/group.h"

namespace lockstep::checkpoint {

struct CheckpointOptions {
  int keep = 2;  ///< latest complete checkpoints to keep; 2 or more, so that one remains if another is damaged
};

/// The parts that a rank writes, by name. Names consist of a-z, A-Z, 0-9, _ and -.
using CheckpointParts = std::map<std::string, StateDict>;

class StagingBuffer;
class VerifiedCheckpoints;
struct SaveRequest;
namespace files {
class FolderLock;
}  // namespace files

/// The result of a save.
struct SaveReport {
  std::string path;                          ///< path of the checkpoint
  std::uint64_t num_bytes = 0;               ///< size of the files of all ranks
  std::chrono::duration<double> stall{};     ///< how long the call blocked on this rank
  std::chrono::duration<double> duration{};  ///< time from the call until the checkpoint was durable
};

/// A directory of checkpoints. Each checkpoint is a subdirectory with the files that the ranks wrote and MANIFEST.json,
/// which is written after all files are on disk. After a failed save, or if a process is killed at any point, a
/// checkpoint is either complete or ignored. Older checkpoints are removed only after the new one is durable, and only
/// if the checkpoints that remain are undamaged: their bytes are verified, unless latest(), load() or an earlier save
/// of this object has verified them and their files have not changed since.
///
/// One training at a time writes to the directory: the first save, or lock(), locks it until this object is destroyed
/// (files/folder_lock.h). Reading needs no lock.
///
/// Collective: all ranks must construct it and call its methods in the same order with the same directory, and each
/// call waits for the other ranks. Not thread-safe.
class Checkpointer {
 public:
  /// Creates the directory if it does not exist. Throws UsageError for invalid options and SystemError, on all ranks.
  Checkpointer(const comm::Group& group, std::string folder, const CheckpointOptions& options = {});
  /// Blocks until the save in flight is complete, bounded by the group's timeouts and by the disk.
  ~Checkpointer();
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  /// Locks the directory against other trainings, unless this object has done so. Blocks for up to 20 s if a process of
  /// another host has locked it and may no longer exist. Throws UsageError (FOLDER_IN_USE) on all ranks, which names
  /// the process that has the lock.
  void lock();

  /// Writes the parts `mine` of this rank and returns when the checkpoint is durable. Ranks may pass different parts,
  /// or none. First waits for a save in flight; if that save failed, throws its error and writes nothing. An error on
  /// any rank is thrown on all ranks and names that rank: UsageError for a name or a value that cannot be saved,
  /// SystemError (CKPT_WRITE_FAILED) if a disk cannot be written. Existing checkpoints are not changed by a failed
  /// save. Locks the directory as lock() does; UsageError (FOLDER_IN_USE) if another training has taken the lock over.
  SaveReport save(std::int64_t step, const CheckpointParts& mine);

  /// Copies `mine` and returns; a background thread writes the copy. At most one save is in flight: the next save, or
  /// wait(), waits for it and throws its error. The next save reuses the memory of the copy.
  void save_async(std::int64_t step, const CheckpointParts& mine);
  /// Returns whether a save is in flight on this rank. Does not block.
  bool in_flight() const;
  /// Waits for the save in flight and returns its report, or throws as save() does. Returns nullopt if there was no
  /// save since the last report.
  std::optional<SaveReport> wait();

  /// Returns the latest complete checkpoint after verifying every byte of it; the ranks share the work and get the same
  /// result. Damaged checkpoints are skipped with a warning (CKPT_SKIPPED) that gives the reason. Returns nullopt if
  /// there is none.
  std::optional<SavedCheckpoint> latest();
  /// Returns the checkpoint at `path`, or latest() for "auto". Throws UsageError (cause kBadFile) on all ranks if it is
  /// damaged, or if "auto" finds none.
  SavedCheckpoint load(const std::string& path);

 private:
  struct InFlight;
  std::string find_damage_together(const SavedCheckpoint& checkpoint);
  SaveRequest request(std::int64_t step) const;
  std::optional<SavedCheckpoint> open(const std::string& path, std::string& reason);

  const base::ForkGuard fork_guard_;
  comm::Group group_;
  comm::Group writer_group_;  // used by the writer threads only
  const std::string folder_;
  const CheckpointOptions options_;
  std::unique_ptr<files::FolderLock> folder_lock_;  // on rank 0, from lock() on
  bool locked_ = false;
  std::unique_ptr<VerifiedCheckpoints> verified_;  // on rank 0; used by one save, latest() or load() at a time
  std::unique_ptr<StagingBuffer> staging_;
  std::unique_ptr<InFlight> in_flight_;
};

}  // namespace lockstep::checkpoint
