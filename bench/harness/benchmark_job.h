// The processes of one implementation under measurement: started once, measured on request.
#pragma once

#include <sys/types.h>

#include <map>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/fd.h"

namespace lockstep::bench {

/// How to start an implementation. kPrefix in `argv` is replaced by the path prefix of its pipes.
struct Implementation {
  std::string name;
  std::vector<std::string> argv;
  std::map<std::string, std::string> env = {};  ///< added to the environment; an empty value unsets the variable
  int ranks = 2;
  double model_copies = 0;  ///< memory of a rank in sizes of the model: parameters, gradients, buckets, optimizer state
};
inline const std::string kPrefix = "@PREFIX@";

/// Runs the ranks of one implementation. Between measurements, each rank blocks in read(2) on the named pipe
/// PREFIX.RANK, so that idle implementations do not disturb the measured one, even if their ranks spin while they wait
/// for each other. The protocol: each rank first writes its pid to the file PREFIX.RANK.pid. When all ranks are ready,
/// rank 0 writes the first result to PREFIX.answers, without a request. A request is a line of integers, which is sent
/// to all ranks; rank 0 writes the result, a line of numbers, to PREFIX.answers. Used by one thread.
class BenchmarkJob {
 public:
  /// Creates the pipes in `folder` and starts the processes. Throws SystemError.
  BenchmarkJob(const Implementation& implementation, const std::string& folder);
  /// Stops the processes: sends SIGTERM, waits for up to one second, and then kills them.
  ~BenchmarkJob();
  BenchmarkJob(const BenchmarkJob&) = delete;
  BenchmarkJob& operator=(const BenchmarkJob&) = delete;

  const std::string& name() const { return implementation_.name; }
  /// Blocks until the first result and returns it. Throws CommError, with the end of the job's output, when the job
  /// exits or the deadline passes before that.
  std::vector<double> wait_until_ready(base::Deadline deadline) { return read_result(deadline); }
  /// Sends `request` to all ranks and blocks until the result. Throws as wait_until_ready().
  std::vector<double> measure(const std::vector<std::int64_t>& request, base::Deadline deadline);
  /// Returns the proportional set size of all ranks together, in bytes.
  std::uint64_t pss_bytes() const;
  /// Closes the pipes, so that the ranks exit, and blocks until they have; kills them at the deadline.
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

/// Starts a process that writes its output to the file `output` ("": /dev/null) and receives SIGTERM when this process
/// dies. Returns its pid. Throws SystemError.
pid_t start_process(const std::vector<std::string>& argv, const std::map<std::string, std::string>& env,
                    const std::string& output);
/// Blocks until a child exits and stores its wait status; returns false at the deadline.
bool wait_for(pid_t pid, base::Deadline deadline, int* status);

/// After this call, SIGINT and SIGTERM make the blocking functions of this file throw Error (INTERRUPTED), so that
/// destructors clean up jobs and folders.
void throw_on_signals();

}  // namespace lockstep::bench
