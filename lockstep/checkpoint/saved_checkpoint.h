// A checkpoint on a disk.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "lockstep/checkpoint/manifest.h"
#include "lockstep/checkpoint/stateful.h"

namespace lockstep::checkpoint {

/// "00000007-step-120": the place of a checkpoint in the order in which they were written, and its step. The order
/// counts: after going back to an older step, what is written then is newer.
struct CheckpointName {
  std::int64_t sequence = 0;
  std::int64_t step = 0;
  auto operator<=>(const CheckpointName&) const = default;
};
std::string to_text(const CheckpointName& name);
/// Whether `text` is such a name, and which.
bool parse_checkpoint_name(std::string_view text, CheckpointName& name);
/// All in `folder`, the newest first, whole or not. None where there is no such folder. Throws SystemError.
std::vector<CheckpointName> list_checkpoints(const std::string& folder);

/// One whose manifest is whole.
class SavedCheckpoint {
 public:
  /// Reads the manifest. Throws SystemError where there is none, and FormatError when it is damaged.
  explicit SavedCheckpoint(std::string path);

  const std::string& path() const { return path_; }
  const Manifest& manifest() const { return manifest_; }
  std::int64_t step() const { return manifest_.step; }
  /// Of the job that wrote it.
  int world_size() const { return manifest_.world_size; }

  /// The names of what a rank of that job wrote.
  std::set<std::string> part_names(int rank = 0) const;
  /// One of them. Tensors are new on the CPU. Every byte is compared with the hashes that were written, so a file that
  /// is damaged, or of another checkpoint, is a FormatError. Throws UsageError for a part that is not there, and as
  /// SafetensorsReader does. Any rank may read any rank's.
  StateDict read(const std::string& part, int rank = 0) const;

  /// Looks whether file number `number` of the manifest is whole: its size, and with `hashes` its bytes. Returns what
  /// is wrong with it, "" for nothing.
  std::string find_damage(std::size_t number, bool verify_hashes) const;

 private:
  std::string path_;
  Manifest manifest_;
};

}  // namespace lockstep::checkpoint
