#include "lockstep/comm/torchrun_rendezvous.h"

#include <future>
#include <memory>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "lockstep/base/error.h"
#include "lockstep/base/thread.h"

namespace lockstep::comm {
namespace {

using base::Deadline;

constexpr auto kPause = std::chrono::milliseconds(20);

/// Returns "" if rank 0 has stored no message before the deadline.
std::string set_or_get(const base::net::Address& address, const std::string& key, const std::string& message,
                       Deadline deadline) {
  c10d::TCPStoreOptions options;
  options.port = address.port;
  options.isServer = false;
  options.waitWorkers = false;
  options.timeout = deadline.remaining();
  const auto tcp_store = c10::make_intrusive<c10d::TCPStore>(address.host, options);
  c10d::Store& store = *tcp_store;  // TCPStore hides the overloads for strings
  if (!message.empty()) {
    store.set(key, message);
    return message;
  }
  // c10d's own wait prints stack traces when it times out, so poll instead.
  while (!store.check({key})) {
    if (deadline.expired()) return "";
    std::this_thread::sleep_for(std::min<std::chrono::milliseconds>(kPause, deadline.remaining()));
  }
  return store.get_to_str(key);
}

}  // namespace

std::string exchange_over_torchrun_store(const base::net::Address& address, const std::string& key,
                                         const std::string& message, Deadline deadline) {
  const auto failed = [&](const std::string& why) {
    return base::CommError(base::Cause::kCoordinatorLost, "init", -1, -1,
                           "torchrun's store at " + to_string(address) + " " + why);
  };
  // If the store's process is stopped, c10d blocks in recv() without a limit. Its thread is then abandoned.
  auto promise = std::make_shared<std::promise<std::string>>();
  std::future<std::string> answer = promise->get_future();
  base::start_thread([=] {
    try {
      promise->set_value(set_or_get(address, key, message, deadline));
    } catch (...) {
      promise->set_exception(std::current_exception());
    }
  }).detach();
  if (answer.wait_until(deadline.when() + std::chrono::seconds(1)) != std::future_status::ready)
    throw failed("does not answer");
  try {
    std::string received = answer.get();
    if (!received.empty()) return received;
  } catch (const std::exception& error) {
    const std::string text = error.what();
    throw failed("failed: " + text.substr(0, text.find('\n')));
  }
  throw base::CommError(base::Cause::kJoinTimeout, "init", -1, 0,
                        "rank 0 did not publish the address of its store in time",
                        "check that rank 0 calls lockstep::init()");
}

}  // namespace lockstep::comm
