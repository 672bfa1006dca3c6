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
#include "lockstep/comm/channel/deadlock_detector.h"

namespace lockstep::comm {
namespace {

using base::Cause;

constexpr auto kOthersRead = std::chrono::seconds(1);  // they look every 200 ms

struct Failure {
  Cause cause = Cause::kRankExited;
  std::string text;
  std::string hint;
  int exit_code = 1;
  std::optional<base::CommError> comm{};  // which may be a consequence, or have been told before
};

/// "std::runtime_error: text": the first line, because what libtorch throws carries stack traces.
std::string text_of(const std::exception& error) {
  const char* name = typeid(error).name();
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> readable(abi::__cxa_demangle(name, nullptr, nullptr, &status),
                                                        std::free);
  const std::string type = readable ? readable.get() : name;
  const std::string what = error.what();
  return what == type ? type : type + ": " + what.substr(0, what.find('\n'));
}

/// libtorch's allocator for the processor's memory has no type of its own for it.
bool is_want_of_memory(const c10::Error& error) {
  return dynamic_cast<const c10::OutOfMemoryError*>(&error) ||
         std::strstr(error.what_without_backtrace(), "can't allocate memory");
}

/// Of the exception that is being handled.
Failure current_failure() {
  try {
    throw;
  } catch (const base::CommError& error) {
    return {error.cause(), error.what(), error.hint(), base::exit_code(error.cause()), error};
  } catch (const base::Error& error) {
    return {error.cause(), error.what(), error.hint(), base::exit_code(error.cause())};
  } catch (const std::bad_alloc& error) {
    return {Cause::kResource, text_of(error), "the process has no memory left", base::exit_code(Cause::kResource)};
  } catch (const c10::Error& error) {
    if (!is_want_of_memory(error)) return {Cause::kRankExited, text_of(error), ""};
    return {Cause::kResource, text_of(error), "the process has no memory left", base::exit_code(Cause::kResource)};
  } catch (const std::exception& error) {
    return {Cause::kRankExited, text_of(error), ""};
  } catch (...) {
    return {Cause::kRankExited, "an exception that is no std::exception", ""};
  }
}

/// Lives as long as the process: a thread may fail after the end of main().
struct Current {
  std::mutex mutex;  // guards listener
  Listener listener;
};
Current& current() {
  static auto* one = new Current;
  return *one;
}

void tell(const Failure& failure) noexcept {
  Listener listener;
  {
    const std::lock_guard lock(current().mutex);
    listener = current().listener;
  }
  if (!listener.watch) return;
  if (failure.comm)
    listener.watch->publish(*failure.comm);
  else
    listener.watch->publish(failure.cause, failure.text, failure.hint);
  if (listener.in_this_process) std::this_thread::sleep_for(kOthersRead);
}

std::terminate_handler before_us = nullptr;

[[noreturn]] void on_terminate() {
  static std::atomic_flag told;
  if (!told.test_and_set()) {
    Failure failure{Cause::kRankDied, "std::terminate() was called", ""};
    if (std::current_exception()) {
      try {
        std::rethrow_exception(std::current_exception());
      } catch (...) {
        failure = current_failure();
        failure.cause = failure.cause == Cause::kRankExited ? Cause::kRankDied : failure.cause;
        failure.text = "an exception that nobody caught: " + failure.text;
      }
    }
    tell(failure);
  }
  if (before_us) before_us();
  std::abort();
}

}  // namespace

void tell_failures_to(Listener listener) {
  const std::lock_guard lock(current().mutex);
  current().listener = std::move(listener);
  if (!before_us) before_us = std::set_terminate(on_terminate);
}

void tell_nobody() noexcept {
  const std::lock_guard lock(current().mutex);
  current().listener = {};
}

int main(int argc, char** argv, const std::function<int(int argc, char** argv)>& program) {
  try {
    return program(argc, argv);
  } catch (...) {
    const Failure failure = current_failure();
    tell(failure);
    std::fflush(nullptr);
    std::fprintf(stderr, "error: %s%s%s\n", failure.text.c_str(), failure.hint.empty() ? "" : "; ",
                 failure.hint.c_str());
    ::_exit(failure.exit_code);
  }
}

}  // namespace lockstep::comm
