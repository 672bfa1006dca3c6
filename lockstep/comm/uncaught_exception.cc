#include "lockstep/comm/uncaught_exception.h"

#include <c10/util/Exception.h>
#include <cxxabi.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
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

namespace lockstep::comm {
namespace {

using base::Cause;

struct UncaughtFailure {
  Cause cause = Cause::kRankExited;
  std::string text;
  std::string hint;
  int exit_code = 1;
  std::optional<base::CommError> comm{};  // may be a consequence of another failure, or already published
};

std::string readable_name(const char* mangled) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> readable(abi::__cxa_demangle(mangled, nullptr, nullptr, &status),
                                                        std::free);
  return readable ? readable.get() : mangled;
}

/// Returns "std::runtime_error: text". libtorch's exceptions contain stack traces, which are left out.
std::string text_of(const std::exception& error) {
  const std::string type = readable_name(typeid(error).name());
  const auto* const torch_error = dynamic_cast<const c10::Error*>(&error);
  std::string what = torch_error ? torch_error->what_without_backtrace() : error.what();
  while (what.ends_with('\n')) what.pop_back();
  return what == type ? type : type + ": " + what;
}

/// Also compares the text, because libtorch's CPU allocator throws no OutOfMemoryError.
bool is_out_of_memory(const c10::Error& error) {
  return dynamic_cast<const c10::OutOfMemoryError*>(&error) ||
         std::strstr(error.what_without_backtrace(), "can't allocate memory");
}

/// Describes the exception that is being handled.
UncaughtFailure current_failure() {
  try {
    throw;
  } catch (const base::CommError& error) {
    return {error.cause(), error.what(), error.hint(), base::exit_code(error.cause()), error};
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
    return {Cause::kRankExited, "an exception of type " + (type ? readable_name(type->name()) : "unknown"), ""};
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
    listener.deadlock_detector->publish_failure(failure.cause, failure.text, failure.hint);
  if (listener.serves_store) std::this_thread::sleep_for(base::kPeersReadTime);
}

std::terminate_handler previous_terminate_handler = nullptr;

[[noreturn]] void on_terminate() {
  static std::atomic_flag is_reported;
  if (!is_reported.test_and_set()) {
    UncaughtFailure failure{Cause::kRankDied, "std::terminate() was called", ""};
    if (std::current_exception()) {
      try {
        std::rethrow_exception(std::current_exception());
      } catch (...) {
        failure = current_failure();
        failure.cause = failure.cause == Cause::kRankExited ? Cause::kRankDied : failure.cause;
        failure.text = "uncaught exception: " + failure.text;
      }
    }
    report(failure);
  }
  if (previous_terminate_handler) previous_terminate_handler();
  std::abort();
}

}  // namespace

int report_failure(base::Cause cause, const std::string& text, const std::string& hint) noexcept {
  report({cause, text, hint, base::exit_code(cause)});
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
    const UncaughtFailure failure = current_failure();
    report(failure);
    std::fflush(nullptr);
    std::fprintf(stderr, "error: %s%s%s\n", failure.text.c_str(), failure.hint.empty() ? "" : "; ",
                 failure.hint.c_str());
    ::_exit(failure.exit_code);
  }
}

}  // namespace lockstep::comm
