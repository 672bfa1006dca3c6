#include "lockstep/checkpoint/verified_checkpoints.h"

#include <sys/stat.h>

#include <exception>

namespace lockstep::checkpoint {
namespace {

/// Appends what changes when the file is written or replaced.
void append_file_state(VerifiedCheckpoints::FileStates& state, const std::string& path) {
  struct stat file{};
  if (::stat(path.c_str(), &file) != 0) return state.push_back(-1);
  state.insert(state.end(), {static_cast<std::int64_t>(file.st_ino), file.st_size, file.st_mtim.tv_sec,
                             file.st_mtim.tv_nsec, file.st_ctim.tv_sec, file.st_ctim.tv_nsec});
}

}  // namespace

VerifiedCheckpoints::FileStates VerifiedCheckpoints::file_states(const SavedCheckpoint& checkpoint) {
  FileStates states;
  append_file_state(states, checkpoint.path() + "/" + kManifestName);
  for (const auto& file : checkpoint.manifest().files) append_file_state(states, checkpoint.path() + "/" + file.name);
  return states;
}

bool VerifiedCheckpoints::is_whole(const std::string& path) {
  try {
    const SavedCheckpoint checkpoint(path);
    FileStates states = file_states(checkpoint);
    if (const auto known = verified_.find(path); known != verified_.end() && known->second == states) return true;
    for (std::size_t i = 0; i < checkpoint.manifest().files.size(); ++i)
      if (!checkpoint.find_damage(i, /*verify_hashes=*/true).empty()) return false;
    add(checkpoint, std::move(states));
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace lockstep::checkpoint
