// A folder that appears whole, or not at all.
#pragma once

#include <string>

#include "lockstep/base/fd.h"

namespace lockstep::checkpoint {

/// A new folder inside of `parent`, of mode 0700, under a name that nobody takes for a whole one; commit() gives it its
/// own. What a process that is killed leaves behind, this folder or the file of an AtomicFile, the next one that makes
/// one in the same place removes: they are locked (flock) while they are written. Where a file system has no such
/// locks, as NFS for folders, they stay.
class AtomicDirectory {
 public:
  /// Throws SystemError and UsageError: see open_directory().
  explicit AtomicDirectory(const std::string& parent);
  AtomicDirectory(const AtomicDirectory&) = delete;
  AtomicDirectory& operator=(const AtomicDirectory&) = delete;
  /// Without commit(): removes it with what is in it.
  ~AtomicDirectory();

  /// For the files of it, each of which is to be on the disk before commit().
  const std::string& path() const { return path_; }

  /// Waits until the disk has the names inside, gives it the name `name`, which nothing has, and waits until the disk
  /// has that. Throws SystemError.
  void commit(const std::string& name);

 private:
  std::string parent_;
  std::string temp_name_;  // empty: nothing to remove
  std::string path_;
  base::Fd parent_directory_;
  base::Fd directory_;
};

/// Removes a folder and the files in it so that none of its names stands for something whole meanwhile. Throws
/// SystemError.
void remove_directory(const std::string& parent, const std::string& name);

}  // namespace lockstep::checkpoint
