// An error that a program does not handle: told to all ranks before the process ends.
#pragma once

#include <functional>
#include <memory>

namespace lockstep::comm {

/// main() of a program that needs no try: `int main(int argc, char** argv) { return lockstep::main(argc, argv, train);
/// }`
///
/// Returns what `program` returns. An exception is printed on stderr, becomes the job's first cause unless there is
/// one, so that every rank that waits for this one ends with its text, and ends the process at once, without static
/// destructors: with the exit code of its cause (docs/04) if it is one of Lockstep's, else with 1.
int main(int argc, char** argv, const std::function<int(int argc, char** argv)>& program);

class DeadlockDetector;

/// Where a failure is told.
struct FailureListener {
  std::shared_ptr<DeadlockDetector> deadlock_detector;
  bool serves_store = false;  ///< the store is: the others need a moment to read it before it ends
};

/// For init(). Also from now on std::terminate(), an exception that nobody catches among its reasons, makes its text
/// the job's first cause, and goes on as before. Kept when an exception unwinds the world: who catches it has something
/// to tell.
void report_failures_to(FailureListener listener);
/// The world has ended in good order.
void stop_reporting_failures() noexcept;

}  // namespace lockstep::comm
