#include "lockstep/checkpoint/files/folder_lock.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "lockstep/base/log.h"
#include "lockstep/base/net/boot_id.h"
#include "lockstep/base/net/socket.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/process_owned.h"
#include "lockstep/base/thread.h"
#include "lockstep/checkpoint/files/directory.h"

namespace lockstep::checkpoint::files {
namespace {

constexpr const char* kFileName = "/LOCK";
constexpr int kWatchedBeats = 3;
constexpr int kPollsPerBeat = 5;
constexpr int kMaxAttempts = 100;  // each time another process has replaced the file meanwhile

/// The contents of the file, one line per field: host, boot ID, process, job, generation.
struct Record {
  std::string host, boot_id, pid, job, generation;

  std::string to_text() const { return host + "\n" + boot_id + "\n" + pid + "\n" + job + "\n" + generation + "\n"; }
  std::string describe() const { return "process " + pid + " on " + host + (job.empty() ? "" : ", job " + job); }
  bool is_earlier_start_of(const Record& other) const {
    const auto before = base::parse_int(generation), now = base::parse_int(other.generation);
    return !job.empty() && job == other.job && before && now && *before < *now;
  }
};

/// Returns nullopt for a file that is empty or has other contents: its writer has ended before it was complete.
std::optional<Record> read_record(int fd) {
  std::array<char, 4096> buffer{};
  const ssize_t size = ::pread(fd, buffer.data(), buffer.size(), 0);
  if (size <= 0) return std::nullopt;
  const auto lines = base::split({buffer.data(), static_cast<std::size_t>(size)}, '\n');
  if (lines.size() != 6) return std::nullopt;
  return Record{std::string(lines[0]), std::string(lines[1]), std::string(lines[2]), std::string(lines[3]),
                std::string(lines[4])};
}

enum class LockResult { kLocked, kBusy, kUnsupported };

LockResult lock_file(int fd) {
  struct flock whole{};
  whole.l_type = F_WRLCK;
  whole.l_whence = SEEK_SET;
  if (::fcntl(fd, F_SETLK, &whole) == 0) return LockResult::kLocked;
  return errno == EACCES || errno == EAGAIN ? LockResult::kBusy : LockResult::kUnsupported;
}

bool is_file_at(const std::string& path, int fd) {
  struct stat at_path{}, opened{};
  return ::stat(path.c_str(), &at_path) == 0 && ::fstat(fd, &opened) == 0 && at_path.st_dev == opened.st_dev &&
         at_path.st_ino == opened.st_ino;
}

bool is_alive(const std::string& pid) {
  const auto number = base::parse_int(pid);
  return number && *number > 0 && (::kill(static_cast<pid_t>(*number), 0) == 0 || errno == EPERM);
}

/// Opens the file for each poll, because NFS shows changes by another host when a file is opened.
bool changes_within(const std::string& path, std::chrono::milliseconds beat) {
  const auto seen = [&]() -> std::vector<std::int64_t> {
    const base::Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    struct stat status{};
    if (!file || ::fstat(file.get(), &status) != 0) return {};
    return {static_cast<std::int64_t>(status.st_ino), status.st_mtim.tv_sec, status.st_mtim.tv_nsec};
  };
  const auto first = seen();
  for (int poll = 0; poll < kWatchedBeats * kPollsPerBeat; ++poll) {
    std::this_thread::sleep_for(beat / kPollsPerBeat);
    if (seen() != first) return true;
  }
  return false;
}

[[noreturn]] void throw_in_use(const std::string& folder, const std::optional<Record>& holder) {
  throw base::UsageError("the directory " + folder + " is in use by another training: " +
                             (holder ? holder->describe() : "a process that has just started"),
                         "wait until it ends, or use another directory", base::Cause::kFolderInUse);
}

}  // namespace

/// The lock of this process. Closing any descriptor of a file releases the process's fcntl locks on it, so each
/// directory has one Holder, which alone opens the file while it has the lock.
class FolderLock::Holder {
 public:
  Holder(std::string folder, const FolderLockOptions& options)
      : folder_(std::move(folder)), path_(folder_ + kFileName), beat_(options.beat) {
    const Record mine{base::net::host_name(), base::net::boot_id(), std::to_string(::getpid()), options.job,
                      std::to_string(options.generation)};
    for (int attempt = 0; attempt < kMaxAttempts && !file_; ++attempt) try_to_lock(mine);
    if (!file_) throw_in_use(folder_, std::nullopt);
    thread_ = base::start_thread_without_signals([this] { run(); });
  }

  ~Holder() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();  // bounded: a beat is one system call
    if (is_file_at(path_, file_.get())) ::unlink(path_.c_str());
  }

  /// False in a child that the holder has forked, where it holds nothing.
  bool is_of_this_process() const { return ::getpid() == pid_; }

  void check() const {
    // An NFS client asks the server for the file at this path again after it has opened the directory.
    const base::Fd directory(::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (is_file_at(path_, file_.get())) return;
    const base::Fd other(::open(path_.c_str(), O_RDONLY | O_CLOEXEC));
    throw_in_use(folder_, other ? read_record(other.get()) : std::nullopt);
  }

 private:
  /// Takes the lock, or throws, or returns because the file has changed meanwhile.
  void try_to_lock(const Record& mine) {
    const base::Fd found(::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666));
    if (!found) throw base::SystemError("cannot lock the directory " + folder_, errno);
    const LockResult result = lock_file(found.get());
    if (!is_file_at(path_, found.get())) return;
    const std::optional<Record> holder = read_record(found.get());
    const bool is_restart = holder && holder->is_earlier_start_of(mine);
    if (!is_restart) {
      if (result == LockResult::kBusy) throw_in_use(folder_, holder);
      if (holder && !may_take_over(*holder, mine, result)) throw_in_use(folder_, holder);
      // Once more, because the file was closed while it was watched, which has released the lock on it.
      if (lock_file(found.get()) == LockResult::kBusy) return;
    }
    if (is_file_at(path_, found.get())) replace_file(mine.to_text());  // `found` stays locked meanwhile
  }

  /// Replaces the file by a new one, so that a holder that is still there notices.
  void replace_file(const std::string& text) {
    const std::string temp = folder_ + "/" + make_temp_name();
    base::Fd file(::openat(AT_FDCWD, temp.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666));
    if (!file) throw base::SystemError("cannot lock the directory " + folder_, errno);
    const ssize_t size = ::pwrite(file.get(), text.data(), text.size(), 0);
    int error = size < 0 ? errno : size != static_cast<ssize_t>(text.size()) ? ENOSPC : 0;
    lock_file(file.get());
    if (error == 0 && ::renameat(AT_FDCWD, temp.c_str(), AT_FDCWD, path_.c_str()) != 0) error = errno;
    if (error == ENOENT) return;  // a save of another process has removed the file as one of a killed process
    if (error != 0) {
      ::unlink(temp.c_str());
      throw base::SystemError("cannot lock the directory " + folder_, error);
    }
    file_ = std::move(file);
  }

  bool may_take_over(const Record& holder, const Record& mine, LockResult result) const {
    const bool same_kernel = holder.boot_id == mine.boot_id && !mine.boot_id.empty();
    if (same_kernel && result == LockResult::kLocked) return true;  // the kernel has released the holder's lock
    if (same_kernel && holder.host == mine.host && !is_alive(holder.pid)) return true;
    base::log_info("the directory " + folder_ + " was locked by " + holder.describe() +
                   "; waiting to see whether that process still exists");
    if (changes_within(path_, beat_)) return false;
    base::log_warning("takes over the directory " + folder_ + ": " + holder.describe() + " has not renewed its lock");
    return true;
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (!changed_.wait_for(lock, beat_, [this] { return stop_; })) ::futimens(file_.get(), nullptr);
  }

  const std::string folder_, path_;
  const std::chrono::milliseconds beat_;
  const pid_t pid_ = ::getpid();
  base::Fd file_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;  // guarded by mutex_
  std::thread thread_;
};

FolderLock::FolderLock(const std::string& folder, const FolderLockOptions& options) {
  static std::mutex mutex;
  static std::map<std::pair<dev_t, ino_t>, std::weak_ptr<Holder>> holders;  // guarded by mutex
  struct stat status{};
  if (::stat(folder.c_str(), &status) != 0) throw base::SystemError("cannot lock the directory " + folder, errno);
  const std::lock_guard lock(mutex);
  std::weak_ptr<Holder>& known = holders[{status.st_dev, status.st_ino}];
  holder_ = known.lock();
  if (!holder_ || !holder_->is_of_this_process()) known = holder_ = base::make_process_owned<Holder>(folder, options);
}

FolderLock::~FolderLock() = default;

void FolderLock::check() const { holder_->check(); }

std::string unique_job_name(const std::string& job, const base::Env& env) {
  const bool is_of_torchrun = env.torchelastic_run_id == job && env.lockstep_job != job;
  return job == "0" || is_of_torchrun ? "" : job;
}

}  // namespace lockstep::checkpoint::files
