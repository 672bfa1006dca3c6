#include "lockstep/base/net/connectivity_probe.h"

#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "lockstep/base/byte_codec.h"
#include "lockstep/base/error.h"

namespace lockstep::base::net {
namespace {

constexpr std::size_t kNumberBytes = 4;
constexpr std::size_t kMaxUnauthenticated = 1024;

std::string encode_number(std::size_t number) {
  std::string bytes;
  base::put_number(bytes, static_cast<std::uint32_t>(number));
  return bytes;
}

int decode_number(std::string_view bytes) {
  return base::ByteReader(bytes, "connectivity probe").number<std::int32_t>();
}

/// Compares in a time that does not depend on the position of the first difference.
bool equal(const std::string& a, const std::string& b) {
  unsigned char difference = a.size() == b.size() ? 0 : 1;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

/// Appends the available bytes to `text` until it has `size` bytes. If the connection is lost, stores the errno in
/// `error` and returns false.
bool read_up_to(int fd, std::string& text, std::size_t size, int& error) {
  char bytes[64];
  while (text.size() < size) {
    const ssize_t got = ::recv(fd, bytes, std::min(size - text.size(), sizeof bytes), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return true;
    error = got == 0 ? ECONNRESET : errno;
    if (got <= 0) return false;
    text.append(bytes, static_cast<std::size_t>(got));
  }
  return true;
}

}  // namespace

ConnectivityProbe::ConnectivityProbe(int self, std::string token) : self_(self), token_(std::move(token)) {}

std::string ConnectivityProbe::make_token() {
  std::string token(kTokenBytes, '\0');
  if (::getrandom(token.data(), token.size(), 0) != static_cast<ssize_t>(token.size()))
    throw base::SystemError("getrandom", errno);
  return token;
}

Address ConnectivityProbe::listen(const std::string& host) {
  listeners_.push_back(base::net::listen_on({host, 0}));
  return base::net::local_address(listeners_.back().get());
}

void ConnectivityProbe::fail(std::size_t index, const std::string& why) {
  outgoing_[index].decided = true;
  outgoing_[index].error = why;
  outgoing_[index].fd.reset();
}

void ConnectivityProbe::connect_to(const Address& address, int node, const std::string& source) {
  outgoing_.emplace_back().node = node;
  try {
    outgoing_.back().fd = base::net::start_connect(address, source);
  } catch (const base::Error& error) {
    fail(outgoing_.size() - 1, error.what());
  }
}

std::vector<pollfd> ConnectivityProbe::entries() const {
  std::vector<pollfd> entries;
  for (const Fd& listener : listeners_)
    entries.push_back({unauthenticated_.size() < kMaxUnauthenticated ? listener.get() : -1, POLLIN, 0});
  for (const Unauthenticated& unauthenticated : unauthenticated_)
    entries.push_back({unauthenticated.fd.get(), POLLIN, 0});
  for (const Outgoing& outgoing : outgoing_)
    entries.push_back(
        {outgoing.decided ? -1 : outgoing.fd.get(), static_cast<short>(outgoing.connected ? POLLIN : POLLOUT), 0});
  return entries;
}

void ConnectivityProbe::advance(std::size_t index) {
  Outgoing& outgoing = outgoing_[index];
  if (!outgoing.connected) {
    if (const int error = base::net::connect_error(outgoing.fd.get())) return fail(index, std::strerror(error));
    const std::string greeting = token_ + encode_number(static_cast<std::size_t>(self_)) + encode_number(index);
    if (::send(outgoing.fd.get(), greeting.data(), greeting.size(), MSG_NOSIGNAL) !=
        static_cast<ssize_t>(greeting.size()))
      return fail(index, std::strerror(errno));
    outgoing.connected = true;
    return;
  }
  int error = 0;
  if (!read_up_to(outgoing.fd.get(), outgoing.answer, kNumberBytes, error))
    return fail(index, error == ECONNRESET ? "the listener there does not belong to this job" : std::strerror(error));
  if (outgoing.answer.size() < kNumberBytes) return;
  if (decode_number(outgoing.answer) != outgoing.node)
    return fail(index, decode_number(outgoing.answer) == self_ ? "the address belongs to this host itself"
                                                               : "another host of the job answers there");
  outgoing.from = base::net::local_address(outgoing.fd.get()).host;
  outgoing.decided = true;
}

/// Returns false once the entry is no longer needed.
bool ConnectivityProbe::read_greeting(Unauthenticated& unauthenticated) {
  int error = 0;
  if (!read_up_to(unauthenticated.fd.get(), unauthenticated.greeting, kTokenBytes + 2 * kNumberBytes, error))
    return false;
  if (unauthenticated.greeting.size() < kTokenBytes + 2 * kNumberBytes) return true;
  if (!equal(unauthenticated.greeting.substr(0, kTokenBytes), token_)) return false;
  const std::string answer = encode_number(static_cast<std::size_t>(self_));
  if (::send(unauthenticated.fd.get(), answer.data(), answer.size(), MSG_NOSIGNAL) !=
      static_cast<ssize_t>(answer.size()))
    return false;
  const auto connection =
      static_cast<std::uint32_t>(decode_number(unauthenticated.greeting.substr(kTokenBytes + kNumberBytes)));
  incoming_[{decode_number(unauthenticated.greeting.substr(kTokenBytes)), unauthenticated.listener, connection}] =
      std::move(unauthenticated.fd);
  return false;
}

void ConnectivityProbe::handle(const std::vector<pollfd>& entries) {
  auto entry = entries.begin();
  std::vector<Unauthenticated> accepted;
  for (std::size_t i = 0; i < listeners_.size(); ++i, ++entry)
    if (entry->revents)
      while (Fd fd = base::net::try_accept(listeners_[i].get())) accepted.push_back({std::move(fd), i});
  for (Unauthenticated& unauthenticated : unauthenticated_)
    if ((entry++)->revents && !read_greeting(unauthenticated)) unauthenticated.fd.reset();
  for (std::size_t i = 0; i < outgoing_.size() && entry != entries.end(); ++i, ++entry)
    if (entry->revents) advance(i);
  std::erase_if(unauthenticated_, [](const Unauthenticated& unauthenticated) { return !unauthenticated.fd; });
  unauthenticated_.insert(unauthenticated_.end(), std::make_move_iterator(accepted.begin()),
                          std::make_move_iterator(accepted.end()));
}

bool ConnectivityProbe::all_decided() const {
  return std::all_of(outgoing_.begin(), outgoing_.end(), [](const Outgoing& outgoing) { return outgoing.decided; });
}

void ConnectivityProbe::fail_undecided() {
  for (std::size_t i = 0; i < outgoing_.size(); ++i)
    if (!outgoing_[i].decided) fail(i, "no answer");
}

Fd ConnectivityProbe::take_incoming(int node, std::size_t index, std::size_t connection) {
  const auto found = incoming_.find({node, index, connection});
  return found == incoming_.end() ? Fd() : std::move(found->second);
}

}  // namespace lockstep::base::net
