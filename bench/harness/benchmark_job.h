// One implementation: its ranks, started once, waiting for their turns.
#pragma once

#include <sys/types.h>

#include <map>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/fd.h"

namespace lockstep::bench {

/// How an implementation is started. Its ranks get the path PREFIX where `argv` says kPrefix.
struct Implementation {
  std::string name;
  std::vector<std::string> argv;
  std::map<std::string, std::string> env = {};  ///< on top of this process's
  int ranks = 2;
  double copies =
      0;  ///< of the model's parameters that a rank has: parameters, gradients, buckets, the optimizer's state
};
inline const std::string kPrefix = "@PREFIX@";

/// Between turns a rank waits in read(2) for a line of the named pipe PREFIX.RANK, whatever its implementation does
/// when it waits: so those who are not at work do not disturb. A turn is a line of integers to all ranks; rank 0
/// answers with a line of numbers in PREFIX.answers. Each rank leaves its pid in the file PREFIX.RANK.pid before the
/// first answer, which rank 0 gives unasked, when all are ready.
class BenchmarkJob {
 public:
  /// Makes the pipes in `folder` and starts it. Throws SystemError.
  BenchmarkJob(const Implementation& implementation, const std::string& folder);
  /// Kills what is left of it.
  ~BenchmarkJob();
  BenchmarkJob(const BenchmarkJob&) = delete;
  BenchmarkJob& operator=(const BenchmarkJob&) = delete;

  const std::string& name() const { return implementation_.name; }
  /// Its first answer. Throws CommError, with the end of what it said, when it ends or the deadline
  /// comes before.
  std::vector<double> wait_until_ready(base::Deadline deadline) { return read_result(deadline); }
  /// Sends `order` to all ranks and waits for the answer. Throws as wait_until_ready().
  std::vector<double> measure(const std::vector<std::int64_t>& request, base::Deadline deadline);
  /// Proportional set size of all ranks together, in bytes.
  std::uint64_t pss_bytes() const;
  /// Lets the ranks end and waits for that; kills them at the deadline.
  void end(base::Deadline deadline);

 private:
  std::vector<double> read_result(base::Deadline deadline);
  [[noreturn]] void fail(const std::string& what) const;

  const Implementation implementation_;
  const std::string prefix_;
  std::vector<base::Fd> request_fds_;
  base::Fd result_fd_;
  std::string unread_;
  pid_t pid_ = -1;
};

/// argv[0] started with this output file ("" is /dev/null) and killed with this process; the pid. Throws SystemError.
pid_t start_process(const std::vector<std::string>& argv, const std::map<std::string, std::string>& env,
                    const std::string& output);
/// Waits for a child and gives its wait status; false at the deadline.
bool wait_for(pid_t pid, base::Deadline deadline, int* status);

/// From here on SIGINT and SIGTERM make the waits of this file throw Error (INTERRUPTED), so that jobs and folders are
/// cleaned up.
void throw_on_signals();

}  // namespace lockstep::bench
