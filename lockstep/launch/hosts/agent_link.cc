#include "lockstep/launch/hosts/agent_link.h"

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "lockstep/base/net/socket.h"

namespace lockstep::launcher {
namespace {

using base::Deadline;
using namespace std::chrono_literals;

constexpr auto kIsAsked = 2s;  // whether it is silent, or this process has slept as well
constexpr auto kOverslept = 1s;
constexpr auto kEnds = 5s;    // after its last frame
constexpr auto kKilled = 1s;  // unless it hangs in the kernel

}  // namespace

AgentLink::AgentLink(std::string host, std::string way, AgentProcess process, std::chrono::milliseconds silence)
    : host_(std::move(host)), way_(std::move(way)), process_(std::move(process)), silence_(silence) {
  base::set_nonblocking(process_.to.get());
  base::set_nonblocking(process_.from.get());
  speaks_by_ = next_word();
}

Deadline AgentLink::next_word() const {
  return silence_ > 0ms ? Deadline::in(silence_) : Deadline::never();  // bounded: as the user wants it
}

void AgentLink::send(const Frame& frame) {
  const std::string bytes = encode(frame);
  const Deadline deadline = Deadline::in(10s);
  for (std::size_t done = 0; done < bytes.size() && process_.to;) {
    const ssize_t size = ::write(process_.to.get(), bytes.data() + done, bytes.size() - done);
    if (size > 0)
      done += static_cast<std::size_t>(size);
    else if (errno == EAGAIN && base::wait_writable(process_.to.get(), deadline))
      continue;
    else if (errno != EINTR)
      process_.to.reset();  // it is gone, or ends its ranks when it sees this
  }
}

void AgentLink::take(std::string_view bytes) {
  if (!shipment_) return frames_.feed(bytes);
  said_ += bytes;
  shipment_->take(said_);
  if (!shipment_->complete()) return;
  frames_.feed(said_);
  shipment_.reset();
}

void AgentLink::ship_more() {
  const std::string_view wanted = shipment_->wanted();
  const ssize_t size = ::write(process_.to.get(), wanted.data(), std::min(wanted.size(), std::size_t{1} << 16));
  if (size > 0)
    shipment_->written(static_cast<std::size_t>(size));
  else if (errno != EAGAIN && errno != EINTR)
    process_.to.reset();  // it is gone
}

std::vector<Frame> AgentLink::read() {
  std::vector<Frame> frames;
  char bytes[1 << 16];
  const ssize_t size = ::read(process_.from.get(), bytes, sizeof bytes);
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return frames;
  if (size > 0) {
    take({bytes, static_cast<std::size_t>(size)});
    speaks_by_ = next_word();
    is_asked_ = false;
  }
  while (auto frame = frames_.next()) frames.push_back(std::move(*frame));
  if (size <= 0) process_.from.reset();
  return frames;
}

bool AgentLink::look_at_clock() {
  if (ends_by_.expired()) {
    ::kill(process_.pid, SIGKILL);
    ends_by_ = Deadline::never();
  }
  if (!speaks_by_.expired()) return false;
  // All may have stood still, as when a machine is suspended: it has time to speak when this process has not slept in
  // between.
  const bool we_slept = Deadline::Clock::now() - speaks_by_.when() > kOverslept;
  speaks_by_ = Deadline::in(kIsAsked);
  if (we_slept || !std::exchange(is_asked_, true)) return false;
  speaks_by_ = Deadline::never();  // bounded: it is killed
  ::kill(process_.pid, SIGKILL);
  return true;
}

bool AgentLink::tether_is_cut() {
  const int error = base::dial_error(tether_.get());
  tether_.reset();
  return base::is_unreachable(error);
}

std::string AgentLink::words() const {
  char bytes[4096];
  const ssize_t size = process_.err ? ::pread(process_.err.get(), bytes, sizeof bytes, 0) : 0;
  std::string text(bytes, static_cast<std::size_t>(std::max<ssize_t>(size, 0)));
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
  return text;
}

void AgentLink::kill() {
  process_.to.reset();
  ::kill(process_.pid, SIGKILL);
}

RankEnd AgentLink::reap() {
  int status = 0;
  bool killed = false;
  Deadline deadline = Deadline::in(kEnds);
  process_.to.reset();
  while (::waitpid(process_.pid, &status, WNOHANG) == 0) {
    if (deadline.expired() && std::exchange(killed, true)) return {.pid = process_.pid, .signal = SIGKILL};
    if (deadline.expired()) {
      ::kill(process_.pid, SIGKILL);
      deadline = Deadline::in(kKilled);
    }
    ::poll(nullptr, 0, 1);
  }
  return {.pid = process_.pid,
          .code = WIFEXITED(status) ? WEXITSTATUS(status) : 0,
          .signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0};
}

}  // namespace lockstep::launcher
