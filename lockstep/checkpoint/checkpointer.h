// The checkpoints of a training: written by all its ranks, and the newest whole one found again.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "lockstep/checkpoint/saved_checkpoint.h"
#include "lockstep/checkpoint/stateful.h"
#include "lockstep/comm/group.h"

namespace lockstep::checkpoint {

struct CheckpointOptions {
  int keep = 2;  ///< of the newest whole ones; 2 or more, so that there is another when one is damaged
};

/// What a rank writes: parts under names of a-z, A-Z, 0-9, _ and -.
using CheckpointParts = std::map<std::string, StateDict>;

class StagingBuffer;

/// How a save went.
struct SaveReport {
  std::string path;                          ///< of the checkpoint
  std::uint64_t num_bytes = 0;               ///< of all ranks
  std::chrono::duration<double> stall{};     ///< how long this rank's caller was kept
  std::chrono::duration<double> duration{};  ///< from the call until it was durable
};

/// A folder of checkpoints, each a folder of its own: the files that ranks wrote, and MANIFEST.json, which is written
/// when all of them are on the disk. Whatever happens in a save, and wherever a process is killed, a checkpoint is
/// there whole or is not taken for one, and older ones go only after it is durable. All ranks make it and call what is
/// here alike, and see the same folder; each waits for the others. One thread.
class Checkpointer {
 public:
  /// Makes the folder where there is none. Throws UsageError for options that are not allowed, and SystemError, on all
  /// ranks.
  Checkpointer(const comm::Group& group, std::string folder, const CheckpointOptions& options = {});
  /// Waits for the save in flight: bounded by the group's limits and by the disk.
  ~Checkpointer();
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  /// Writes this rank's `mine`, and returns when the checkpoint is durable; only rank 0 may have something to write, or
  /// each its own. Before that waits for a save in flight. What goes wrong on any rank is thrown on all, and names it:
  /// UsageError for a name or a value that cannot be saved, SystemError (CKPT_WRITE_FAILED) when a disk takes no more;
  /// the checkpoints that were there are untouched then.
  SaveReport save(std::int64_t step, const CheckpointParts& mine);

  /// Copies `mine`, and returns; a thread writes the copy. One save at most is in flight: the next one, or wait(),
  /// waits for it, and throws what went wrong. The memory of the copy is kept for the next.
  void save_async(std::int64_t step, const CheckpointParts& mine);
  /// Whether one is in flight on this rank. Waits for nobody.
  bool in_flight() const;
  /// Waits for it and says how it went, as save() does; nothing when there was none since the last report.
  std::optional<SaveReport> wait();

  /// The newest one that is whole, every byte of it compared; the ranks share the work, and have the same answer. Those
  /// that are damaged are passed over with a warning (CKPT_SKIPPED) that says why. Nothing where there is none.
  std::optional<SavedCheckpoint> latest();
  /// One by its path, or for "auto" the newest(). Throws UsageError on all ranks (cause kBadFile) when it is damaged,
  /// and for "auto" when there is none.
  SavedCheckpoint load(const std::string& path);

 private:
  struct InFlight;
  std::string find_damage_together(const SavedCheckpoint& checkpoint);
  std::optional<SavedCheckpoint> open(const std::string& path, std::string& reason);

  comm::Group group_;
  comm::Group writer_group_;  // of the threads
  const std::string folder_;
  const CheckpointOptions options_;
  std::unique_ptr<StagingBuffer> staging_;
  std::unique_ptr<InFlight> in_flight_;
};

}  // namespace lockstep::checkpoint
