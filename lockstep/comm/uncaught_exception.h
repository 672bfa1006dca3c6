// Reports an unhandled error of a program to all ranks before the process ends.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "lockstep/base/cause.h"

namespace lockstep::comm::channel {
class DeadlockDetector;
}  // namespace lockstep::comm::channel

namespace lockstep::comm {

/// Runs `program` as the body of main(), so that the program needs no try block:
/// `int main(int argc, char** argv) { return lockstep::main(argc, argv, train); }`
///
/// Returns what `program` returns. If `program` throws, "NAME: error: TEXT" is printed on stderr, and the exception
/// becomes the job's first cause unless there is one, so that every rank that waits for this rank fails with the same
/// text. Then the process exits at once, without static destructors, with the exit code of the cause
/// (docs/reference/exit-codes.md) if the exception is one of Lockstep's, else with 1. If an operation between ranks
/// failed while `program` handled another exception, the job's first cause is that one. The failure of a child that the
/// rank has forked is only printed: it is not the job's.
int main(int argc, char** argv, const std::function<int(int argc, char** argv)>& program);

/// For other languages: publishes an error that ends this process as the job's first cause, unless there is one that it
/// has not led to. Returns the exit code of the cause (1 for kRankExited), with which the process should exit.
int report_failure(base::Cause cause, const std::string& text, const std::string& hint, bool led_to_cause) noexcept;

/// The destination of failure reports.
struct FailureListener {
  std::shared_ptr<channel::DeadlockDetector> deadlock_detector;
  bool serves_store = false;  ///< this process serves the store, and the other ranks need time to read from it
};

/// For init(): starts reporting failures to `listener`. From then on std::terminate(), for example after an uncaught
/// exception, publishes its text as the job's first cause and then continues as before. The listener stays in place
/// when an exception destroys the world, because the code that catches the exception may still report it.
void report_failures_to(FailureListener listener);
/// Stops reporting: the world has ended without an error.
void stop_reporting_failures() noexcept;

}  // namespace lockstep::comm
