#include "lockstep/launch/hosts/agent_link.h"

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "lockstep/base/net/socket.h"
#include "lockstep/base/timeouts.h"

namespace lockstep::launcher::hosts {
namespace {

using base::Deadline;
using namespace std::chrono_literals;

constexpr auto kSuspendThreshold = 1s;
constexpr std::size_t kMaxFirstOutput = 200;

}  // namespace

AgentLink::AgentLink(std::string host, std::string via, AgentProcess process, std::chrono::milliseconds max_silence)
    : host_(std::move(host)), via_(std::move(via)), process_(std::move(process)), max_silence_(max_silence) {
  for (const base::Fd* end : {&process_.to, &process_.from})
    if (*end) base::set_nonblocking(end->get());
  message_due_ = next_message_due();
}

Deadline AgentLink::next_message_due() const {
  return max_silence_ > 0ms ? Deadline::in(max_silence_) : Deadline::never();  // bounded: --stall-timeout 0 asks for it
}

void AgentLink::send(const protocol::Frame& frame) {
  const std::string bytes = protocol::encode(frame);
  const Deadline deadline = Deadline::in(base::kAgentSendTimeout);
  for (std::size_t done = 0; done < bytes.size() && process_.to;) {
    const ssize_t size = ::write(process_.to.get(), bytes.data() + done, bytes.size() - done);
    const int error = errno;
    if (size > 0)
      done += static_cast<std::size_t>(size);
    else if (error == EAGAIN && base::net::wait_writable(process_.to.get(), deadline))
      continue;
    else if (error != EINTR)
      process_.to.reset();  // the agent has ended, or it ends its ranks when it reads the end of the pipe
  }
}

void AgentLink::feed(std::string_view bytes) {
  if (!staging_) {
    first_output_ += bytes.substr(0, kMaxFirstOutput - std::min(kMaxFirstOutput, first_output_.size()));
    return frames_.feed(bytes);
  }
  script_output_ += bytes;
  first_output_ = script_output_.substr(0, kMaxFirstOutput);  // for the error, if consume() throws
  staging_->consume(script_output_);
  first_output_.clear();
  if (!staging_->complete()) return;
  staging_.reset();
  feed(std::exchange(script_output_, {}));
}

void AgentLink::continue_staging() {
  const std::string_view pending_bytes = staging_->pending_bytes();
  const ssize_t size =
      ::write(process_.to.get(), pending_bytes.data(), std::min(pending_bytes.size(), std::size_t{1} << 16));
  if (size > 0)
    staging_->advance(static_cast<std::size_t>(size));
  else if (errno != EAGAIN && errno != EINTR)
    process_.to.reset();  // the agent has ended
}

std::vector<protocol::Frame> AgentLink::read() {
  std::vector<protocol::Frame> frames;
  char bytes[1 << 16];
  const ssize_t size = ::read(process_.from.get(), bytes, sizeof bytes);
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return frames;
  if (size > 0) {
    feed({bytes, static_cast<std::size_t>(size)});
    message_due_ = next_message_due();
    is_second_silence_ = false;
  }
  while (auto frame = frames_.next()) frames.push_back(std::move(*frame));
  if (size <= 0) process_.from.reset();
  return frames;
}

void AgentLink::kill_process() const {
  if (process_.pid > 0) ::kill(process_.pid, SIGKILL);  // -1 would be every process
}

bool AgentLink::check_timeouts() {
  if (exit_due_.expired()) {
    kill_process();
    exit_due_ = Deadline::never();
  }
  if (!message_due_.expired()) return false;
  // If this process was suspended as well, as when the machine sleeps, the agent may have sent data that was not read:
  // wait for another base::kSecondAgentSilence.
  const bool we_slept = Deadline::Clock::now() - message_due_.when() > kSuspendThreshold;
  message_due_ = Deadline::in(base::kSecondAgentSilence);
  if (we_slept || !std::exchange(is_second_silence_, true)) return false;
  message_due_ = Deadline::never();  // bounded: the agent is killed
  kill_process();
  return true;
}

bool AgentLink::close_liveness_fd() {
  const int error = base::net::connect_error(liveness_fd_.get());
  liveness_fd_.reset();
  return base::net::is_unreachable(error);
}

std::string AgentLink::stderr_text() const {
  char bytes[4096];
  const ssize_t size = process_.err ? ::pread(process_.err.get(), bytes, sizeof bytes, 0) : 0;
  std::string text(bytes, static_cast<std::size_t>(std::max<ssize_t>(size, 0)));
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
  return text;
}

std::string AgentLink::first_output() const {
  const auto is_text = [](unsigned char c) { return (c >= ' ' && c < 0x7f) || c == '\n'; };
  const auto end = std::ranges::find_if_not(first_output_, is_text);
  return {first_output_.begin(), end};
}

void AgentLink::kill() {
  process_.to.reset();
  process_.from.reset();
  kill_process();
}

protocol::RankExit AgentLink::reap() {
  int status = 0;
  bool killed = false;
  Deadline deadline = Deadline::in(base::kAgentReapTimeout);
  process_.to.reset();
  if (process_.pid <= 0) return {};
  while (::waitpid(process_.pid, &status, WNOHANG) == 0) {
    if (deadline.expired() && std::exchange(killed, true)) return {.pid = process_.pid, .signal = SIGKILL};
    if (deadline.expired()) {
      kill_process();
      deadline = Deadline::in(base::kAgentKillTimeout);
    }
    ::poll(nullptr, 0, 1);
  }
  return {.pid = process_.pid,
          .code = WIFEXITED(status) ? WEXITSTATUS(status) : 0,
          .signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0};
}

}  // namespace lockstep::launcher::hosts
