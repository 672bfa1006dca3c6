// A lock on a directory: one training at a time writes to it.
#pragma once

#include <chrono>
#include <memory>
#include <string>

namespace lockstep::base {
struct Env;
}  // namespace lockstep::base

namespace lockstep::checkpoint::files {

struct FolderLockOptions {
  std::string job = {};                  ///< name of the job, which no other job has; "": none. See unique_job_name()
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
/// system, may lose the lock: check() throws then.
///
/// A later start of the same job takes the lock over at once, even while the kernel or the file system still has the
/// lock of the earlier one: the launcher has ended the earlier start, but an NFS server keeps the locks of a lost host
/// for a while. If a process of the earlier start is left on a host that the launcher has lost, check() throws there.
class FolderLock {
 public:
  /// Locks `folder`, which must exist. Blocks for at most four beats if the lock belongs to a process of another host.
  /// Throws UsageError (kFolderInUse), which names the holder, if another process has the lock, and SystemError if the
  /// file cannot be written.
  explicit FolderLock(const std::string& folder, const FolderLockOptions& options = {});
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

  /// Throws UsageError (kFolderInUse) if another process has taken the lock over. Any thread may call it.
  void check() const;

 private:
  class Holder;
  std::shared_ptr<Holder> holder_;
};

/// Returns `job`, the name of this process's job, if no other job can have it; else "". Names that `lockstep run` and
/// SLURM give are unique. The user chooses those of torchrun, and without a launcher the name is "0". Pure.
std::string unique_job_name(const std::string& job, const base::Env& env);

}  // namespace lockstep::checkpoint::files
