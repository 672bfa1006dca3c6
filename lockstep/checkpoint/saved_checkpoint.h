// Names, lists and reads the checkpoints in a directory.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "lockstep/checkpoint/manifest.h"
#include "lockstep/checkpoint/stateful.h"

namespace lockstep::checkpoint {

/// The name of a checkpoint, such as "00000007-step-120": its number in the order of writing, and its step. The number
/// decides which checkpoint is the latest: after a run resumes from an older step, its next checkpoint counts as later.
struct CheckpointName {
  std::int64_t sequence = 0;
  std::int64_t step = 0;
  auto operator<=>(const CheckpointName&) const = default;
};
std::string to_text(const CheckpointName& name);
/// Parses `text` into `name`; returns false if it is not a checkpoint name.
bool parse_checkpoint_name(std::string_view text, CheckpointName& name);
/// Returns the names of all checkpoints in `folder`, the latest first, complete or not; empty if the directory does not
/// exist. Throws SystemError.
std::vector<CheckpointName> list_checkpoints(const std::string& folder);

/// A checkpoint with a valid manifest.
class SavedCheckpoint {
 public:
  /// Reads the manifest. Throws SystemError if it does not exist, and FormatError if it is damaged.
  explicit SavedCheckpoint(std::string path);

  const std::string& path() const { return path_; }
  const Manifest& manifest() const { return manifest_; }
  std::int64_t step() const { return manifest_.step; }
  /// The number of ranks of the job that wrote it.
  int world_size() const { return manifest_.world_size; }

  /// Returns the names of the parts that a rank of that job wrote.
  std::set<std::string> part_names(int rank = 0) const;
  /// Reads one part; the tensors are newly allocated on the CPU. Every byte is compared with the stored hashes, so a
  /// file that is damaged or belongs to another checkpoint throws FormatError. Throws UsageError for a part that does
  /// not exist, and as SafetensorsReader does. Any rank may read the parts of any rank.
  StateDict read(const std::string& part, int rank = 0) const;

  /// Checks the size of file number `number` of the manifest and, with `verify_hashes`, its contents. Returns a
  /// description of the damage, or "" if there is none.
  std::string find_damage(std::size_t number, bool verify_hashes) const;

 private:
  std::string path_;
  Manifest manifest_;
};

}  // namespace lockstep::checkpoint
