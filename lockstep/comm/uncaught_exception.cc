#include "lockstep/comm/uncaught_exception.h"

#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <cxxabi.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <typeinfo>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/timeouts.h"
#include "lockstep/comm/arena/cpu_allocator.h"
#include "lockstep/comm/channel/deadlock_detector.h"
#include "lockstep/job/fatal.h"
#include "lockstep/job/python_exception.h"

namespace lockstep::comm {
namespace {

using base::Cause;

struct UncaughtFailure {
  Cause cause = Cause::kRankExited;
  std::string text;
  std::string hint;
  int exit_code = 1;
  std::optional<base::CommError> comm{};  // may be a consequence of another failure, or already published
  bool led_to_cause = false;              // to the failure of an operation, which may be published
};

UncaughtFailure failure_of(const std::exception_ptr& pending);

/// Returns "std::runtime_error: text", behind that of an exception nested in it. libtorch's exceptions contain stack
/// traces, which are left out.
std::string text_of(const std::exception& error) {
  const std::string type = c10::demangle(typeid(error).name());
  const auto* const torch_error = dynamic_cast<const c10::Error*>(&error);
  std::string what = torch_error ? torch_error->what_without_backtrace() : error.what();
  while (what.ends_with('\n')) what.pop_back();
  const auto* const nested = dynamic_cast<const std::nested_exception*>(&error);
  const std::string before =
      nested && nested->nested_ptr() ? failure_of(nested->nested_ptr()).text + std::string(job::kThen) : "";
  return before + (what == type || nested ? what : type + ": " + what);
}

/// Also compares the text, because libtorch's CPU allocator throws no OutOfMemoryError.
bool is_out_of_memory(const c10::Error& error) {
  return dynamic_cast<const c10::OutOfMemoryError*>(&error) ||
         std::strstr(error.what_without_backtrace(), "can't allocate memory");
}

/// Describes the failure of an operation. If it is a call that the other ranks did not make, and the program made it
/// while it handled an exception of its own, that one has led to the failure, unless the others do the same, which may
/// have read of it as the loss of a peer.
UncaughtFailure failure_of(const base::CommError& error) {
  const bool has_lost_peer = dynamic_cast<const base::PeerLostError*>(&error);
  if (error.while_handling() && (job::is_difference(error.cause()) || has_lost_peer)) {
    UncaughtFailure first = failure_of(error.while_handling());
    if (!first.comm && first.cause == Cause::kRankExited) {
      if (has_lost_peer)
        return {Cause::kPeerUnreachable, error.what(), error.hint(), base::exit_code(error.cause()), {}, true};
      first.text += std::string(job::kThen) + error.what();
      first.led_to_cause = true;
      return first;
    }
  }
  return {error.cause(), error.what(), error.hint(), base::exit_code(error.cause()), error};
}

UncaughtFailure failure_of(const std::exception_ptr& pending) {
  try {
    std::rethrow_exception(pending);
  } catch (const base::CommError& error) {
    return failure_of(error);
  } catch (const base::Error& error) {
    return {error.cause(), error.what(), error.hint(), base::exit_code(error.cause())};
  } catch (const arena::TensorOutOfMemory& error) {
    return {Cause::kResource, error.what_without_backtrace(), error.hint(), base::exit_code(Cause::kResource)};
  } catch (const std::bad_alloc& error) {
    return {Cause::kResource, text_of(error), "the process has no memory left", base::exit_code(Cause::kResource)};
  } catch (const c10::Error& error) {
    if (!is_out_of_memory(error)) return {Cause::kRankExited, text_of(error), ""};
    return {Cause::kResource, text_of(error), "the process has no memory left", base::exit_code(Cause::kResource)};
  } catch (const std::exception& error) {
    return {Cause::kRankExited, text_of(error), ""};
  } catch (...) {
    const std::type_info* const type = abi::__cxa_current_exception_type();
    return {Cause::kRankExited, "an exception of type " + (type ? c10::demangle(type->name()) : "unknown"), ""};
  }
}

/// Never destroyed: a thread may fail after main() has returned.
struct ListenerSlot {
  std::mutex mutex;  // guards the others
  FailureListener listener;
  pid_t process = 0;  // that reports: not a child that it forks
};
ListenerSlot& listener_slot() {
  static auto* slot = new ListenerSlot;
  return *slot;
}

void report(const UncaughtFailure& failure) noexcept {
  if (listener_slot().process != ::getpid()) return;  // before the lock, which a child may find locked for ever
  FailureListener listener;
  {
    const std::lock_guard lock(listener_slot().mutex);
    listener = listener_slot().listener;
  }
  if (!listener.deadlock_detector) return;
  if (failure.comm)
    listener.deadlock_detector->publish_failure(*failure.comm);
  else
    listener.deadlock_detector->publish_failure(failure.cause, failure.text, failure.hint, failure.led_to_cause);
  if (listener.serves_store) std::this_thread::sleep_for(base::kPeersReadTime);
}

std::terminate_handler previous_terminate_handler = nullptr;

[[noreturn]] void on_terminate() {
  static std::atomic_flag is_reported;
  if (!is_reported.test_and_set()) {
    UncaughtFailure failure{Cause::kRankDied, "std::terminate() was called", ""};
    if (const std::exception_ptr pending = std::current_exception()) {
      failure = failure_of(pending);
      failure.cause = failure.cause == Cause::kRankExited ? Cause::kRankDied : failure.cause;
      failure.text = "uncaught exception: " + failure.text;
    }
    report(failure);
  }
  if (previous_terminate_handler) previous_terminate_handler();
  std::abort();
}

}  // namespace

int report_failure(base::Cause cause, const std::string& text, const std::string& hint, bool led_to_cause) noexcept {
  report({.cause = cause, .text = text, .hint = hint, .led_to_cause = led_to_cause});
  return base::exit_code(cause);
}

void report_failures_to(FailureListener listener) {
  const std::lock_guard lock(listener_slot().mutex);
  listener_slot().listener = std::move(listener);
  listener_slot().process = ::getpid();
  if (!previous_terminate_handler) previous_terminate_handler = std::set_terminate(on_terminate);
}

void stop_reporting_failures() noexcept {
  const std::lock_guard lock(listener_slot().mutex);
  listener_slot().listener = {};
}

int main(int argc, char** argv, const std::function<int(int argc, char** argv)>& program) {
  try {
    return program(argc, argv);
  } catch (...) {
    const UncaughtFailure failure = failure_of(std::current_exception());
    report(failure);
    std::fflush(nullptr);
    std::fprintf(stderr, "%s: error: %s%s%s\n", ::program_invocation_short_name, failure.text.c_str(),
                 failure.hint.empty() ? "" : "; ", failure.hint.c_str());
    ::_exit(failure.exit_code);
  }
}

}  // namespace lockstep::comm
