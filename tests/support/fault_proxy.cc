#include "tests/support/fault_proxy.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <vector>

#include "lockstep/base/error.h"

namespace lockstep::tests {

using base::Deadline;
using namespace std::chrono_literals;

FaultProxy::FaultProxy(base::net::Address target)
    : target_(std::move(target)),
      listener_(base::net::listen_on({"127.0.0.1", 0})),
      address_(base::net::local_address(listener_.get())),
      thread_([this] { run(); }) {}

FaultProxy::~FaultProxy() {
  stop_ = true;
  thread_.join();  // bounded: run() checks stop_ every 20 ms
}

void FaultProxy::flip_bit(bool to_server, std::uint64_t at, int bit) {
  const std::lock_guard lock(mutex_);
  flip_to_server_ = to_server;
  flip_at_ = static_cast<std::int64_t>(at);
  flip_bit_ = bit;
}

void FaultProxy::stop_listening() {
  const std::lock_guard lock(mutex_);
  listener_.reset();
}

void FaultProxy::close_connections(CloseMode how) {
  const std::lock_guard lock(mutex_);
  for (Connection& one : connections_) {
    if (how == CloseMode::kHalfClose) {
      ::shutdown(one.server.get(), SHUT_WR);
      one.to_server.is_closed = true;
      continue;
    }
    const linger at_once{.l_onoff = how == CloseMode::kReset, .l_linger = 0};
    for (base::Fd* fd : {&one.client, &one.server}) {
      ::setsockopt(fd->get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
      fd->reset();
    }
  }
  if (how != CloseMode::kHalfClose) connections_.clear();
}

void FaultProxy::accept() {
  base::Fd client = listener_ ? base::net::try_accept(listener_.get()) : base::Fd();
  if (!client) return;
  try {
    connections_.push_back({std::move(client), base::net::connect_to(target_, Deadline::in(1s)), {}, {}});
    ++count_;
  } catch (const base::Error&) {
    // Close the client's connection, as if the server were not listening.
  }
}

/// Forwards pending bytes in one direction. Returns false if the connection has ended.
bool FaultProxy::forward(Connection& connection, bool to_server) {
  Stream& stream = to_server ? connection.to_server : connection.to_client;
  if (stream.is_closed) return true;
  const int from = (to_server ? connection.client : connection.server).get();
  const int to = (to_server ? connection.server : connection.client).get();
  char bytes[65536];
  const ssize_t got = ::recv(from, bytes, sizeof bytes, 0);
  if (got < 0) return errno == EAGAIN || errno == EINTR;
  if (got == 0) {
    ::shutdown(to, SHUT_WR);
    stream.is_closed = true;
    return !(connection.to_server.is_closed && connection.to_client.is_closed);
  }
  const auto end = stream.forwarded_bytes + static_cast<std::uint64_t>(got);
  if (to_server == flip_to_server_ && flip_at_ >= static_cast<std::int64_t>(stream.forwarded_bytes) &&
      flip_at_ < static_cast<std::int64_t>(end)) {
    char& byte = bytes[static_cast<std::uint64_t>(flip_at_) - stream.forwarded_bytes];
    byte = static_cast<char>(byte ^ (1 << flip_bit_));
  }
  stream.forwarded_bytes = end;
  try {
    for (std::size_t at = 0; at < static_cast<std::size_t>(got); at += chunk_size_)
      base::net::send_all(to, {bytes + at, std::min<std::size_t>(chunk_size_, static_cast<std::size_t>(got) - at)},
                          Deadline::in(5s));
  } catch (const base::SystemError&) {
    return false;
  }
  return true;
}

void FaultProxy::run() {
  while (!stop_) {
    std::vector<pollfd> entries;
    {
      const std::lock_guard lock(mutex_);
      entries.push_back({listener_.get(), POLLIN, 0});
      for (const Connection& one : connections_) {
        entries.push_back({one.to_server.is_closed ? -1 : one.client.get(), POLLIN, 0});
        entries.push_back({one.to_client.is_closed ? -1 : one.server.get(), POLLIN, 0});
      }
    }
    ::poll(entries.data(), entries.size(), 20);
    const std::lock_guard lock(mutex_);
    accept();
    connections_.remove_if([this](Connection& one) { return !forward(one, true) || !forward(one, false); });
  }
}

}  // namespace lockstep::tests
