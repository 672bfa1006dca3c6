// A lock on a directory: one training at a time writes to it.
#pragma once

#include <chrono>
#include <memory>
#include <string>

namespace lockstep::checkpoint::files {

struct FolderLockOptions {
  std::string job = {};                  ///< name of the job
  int generation = 0;                    ///< restarts of this job so far
  std::chrono::milliseconds beat{5000};  ///< interval at which the holder shows that it exists
};

/// Holds the lock of a directory: the file LOCK in it, with the holder's host and process. Objects of one process on
/// one directory share the lock. A child that this process forks does not have it.
///
/// On one host, the kernel releases the lock when the process ends (fcntl, F_SETLK). Also between hosts if the file
/// system passes such locks on. For file systems that do not, such as some NFS mounts, the holder sets the file's
/// modification time at every beat, from a thread, and a newcomer on another host watches the file for three beats
/// before it takes the lock over. A holder that did not run for that long, because it was stopped or had lost the file
/// system, may lose the lock: check() tells. A later start of the same job takes the lock over at once.
class FolderLock {
 public:
  /// Locks `folder`, which must exist. Blocks for at most four beats if the lock belongs to a process of another host.
  /// Throws UsageError (kFolderInUse), which names the holder, if another process has the lock, and SystemError.
  explicit FolderLock(const std::string& folder, const FolderLockOptions& options = {});
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

  /// Throws UsageError (kFolderInUse) if another process has taken the lock over.
  void check() const;

 private:
  class Holder;
  std::shared_ptr<Holder> holder_;
};

}  // namespace lockstep::checkpoint::files
