#include "lockstep/launch/protocol/connectivity_probe.h"

#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "lockstep/base/error.h"

namespace lockstep::launcher {
namespace {

constexpr std::size_t kNumberBytes = 4;
constexpr std::size_t kMaxStrangers = 1024;

std::string bytes_of(std::size_t number) {
  std::string bytes;
  for (int i = 0; i < 4; ++i) bytes += static_cast<char>(static_cast<std::uint32_t>(number) >> (8 * i));
  return bytes;
}

int number_in(const std::string& bytes) {
  std::uint32_t number = 0;
  for (std::size_t i = 0; i < kNumberBytes; ++i)
    number |= static_cast<std::uint32_t>(static_cast<unsigned char>(bytes[i])) << (8 * i);
  return static_cast<int>(number);
}

bool equal(const std::string& a, const std::string& b) {
  unsigned char difference = a.size() == b.size() ? 0 : 1;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

/// Reads on until `text` has `size` bytes. False when the other end is gone; the errno is then in `error`.
bool fill(int fd, std::string& text, std::size_t size, int& error) {
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

Crossing::Crossing(int self, std::string token) : self_(self), token_(std::move(token)) {}

std::string Crossing::new_token() {
  std::string token(kTokenBytes, '\0');
  if (::getrandom(token.data(), token.size(), 0) != static_cast<ssize_t>(token.size()))
    throw base::SystemError("getrandom", errno);
  return token;
}

base::Address Crossing::listen(const std::string& host) {
  listeners_.push_back(base::listen_on({host, 0}));
  return base::local_address(listeners_.back().get());
}

void Crossing::fail(std::size_t index, const std::string& why) {
  dialled_[index].decided = true;
  dialled_[index].error = why;
  dialled_[index].fd.reset();
}

void Crossing::dial(const base::Address& address, int node, const std::string& source) {
  dialled_.emplace_back();
  attempts_.push_back({.node = node});
  try {
    dialled_.back().fd = base::begin_dial(address, source);
  } catch (const base::Error& error) {
    fail(dialled_.size() - 1, error.what());
  }
}

std::vector<pollfd> Crossing::entries() const {
  std::vector<pollfd> entries;
  for (const base::Fd& listener : listeners_)
    entries.push_back({strangers_.size() < kMaxStrangers ? listener.get() : -1, POLLIN, 0});
  for (const Stranger& stranger : strangers_) entries.push_back({stranger.fd.get(), POLLIN, 0});
  for (std::size_t i = 0; i < dialled_.size(); ++i)
    entries.push_back({dialled_[i].decided ? -1 : dialled_[i].fd.get(),
                       static_cast<short>(attempts_[i].connected ? POLLIN : POLLOUT), 0});
  return entries;
}

void Crossing::go_on(std::size_t index) {
  Dialled& dialled = dialled_[index];
  Attempt& attempt = attempts_[index];
  if (!attempt.connected) {
    if (const int error = base::dial_error(dialled.fd.get())) return fail(index, std::strerror(error));
    const std::string greeting = token_ + bytes_of(static_cast<std::uint32_t>(self_)) + bytes_of(index);
    if (::send(dialled.fd.get(), greeting.data(), greeting.size(), MSG_NOSIGNAL) !=
        static_cast<ssize_t>(greeting.size()))
      return fail(index, std::strerror(errno));
    attempt.connected = true;
    return;
  }
  int error = 0;
  if (!fill(dialled.fd.get(), attempt.answer, kNumberBytes, error))
    return fail(index, error == ECONNRESET ? "a stranger listens there" : std::strerror(error));
  if (attempt.answer.size() < kNumberBytes) return;
  if (number_in(attempt.answer) != attempt.node)
    return fail(index, number_in(attempt.answer) == self_ ? "that is this host itself" : "another host answers there");
  dialled.from = base::local_address(dialled.fd.get()).host;
  dialled.decided = true;
}

/// False when it is of no more interest.
bool Crossing::listen_to(Stranger& stranger) {
  int error = 0;
  if (!fill(stranger.fd.get(), stranger.greeting, kTokenBytes + 2 * kNumberBytes, error)) return false;
  if (stranger.greeting.size() < kTokenBytes + 2 * kNumberBytes) return true;
  if (!equal(stranger.greeting.substr(0, kTokenBytes), token_)) return false;
  const std::string answer = bytes_of(static_cast<std::uint32_t>(self_));
  if (::send(stranger.fd.get(), answer.data(), answer.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(answer.size()))
    return false;
  const auto dial = static_cast<std::uint32_t>(number_in(stranger.greeting.substr(kTokenBytes + kNumberBytes)));
  callers_[{number_in(stranger.greeting.substr(kTokenBytes)), stranger.listener, dial}] = std::move(stranger.fd);
  return false;
}

void Crossing::handle(const std::vector<pollfd>& entries) {
  auto entry = entries.begin();
  std::vector<Stranger> come;
  for (std::size_t i = 0; i < listeners_.size(); ++i, ++entry)
    if (entry->revents)
      while (base::Fd fd = base::accept_one(listeners_[i].get())) come.push_back({std::move(fd), i});
  for (Stranger& stranger : strangers_)
    if ((entry++)->revents && !listen_to(stranger)) stranger.fd.reset();
  for (std::size_t i = 0; i < dialled_.size() && entry != entries.end(); ++i, ++entry)
    if (entry->revents) go_on(i);
  std::erase_if(strangers_, [](const Stranger& stranger) { return !stranger.fd; });
  strangers_.insert(strangers_.end(), std::make_move_iterator(come.begin()), std::make_move_iterator(come.end()));
}

bool Crossing::all_decided() const {
  return std::all_of(dialled_.begin(), dialled_.end(), [](const Dialled& dialled) { return dialled.decided; });
}

void Crossing::give_up() {
  for (std::size_t i = 0; i < dialled_.size(); ++i)
    if (!dialled_[i].decided) fail(i, "no answer");
}

base::Fd Crossing::take_caller(int node, std::size_t index, std::size_t dial) {
  const auto found = callers_.find({node, index, dial});
  return found == callers_.end() ? base::Fd() : std::move(found->second);
}

}  // namespace lockstep::launcher
