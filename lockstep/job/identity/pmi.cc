#include "lockstep/job/identity/pmi.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "lockstep/base/check.h"
#include "lockstep/base/error.h"
#include "lockstep/base/net/socket.h"
#include "lockstep/base/parse.h"

namespace lockstep::job::identity {
namespace {

using base::Cause;
using base::CommError;
using base::Deadline;

constexpr std::size_t kMaxLine = 4096;
constexpr std::size_t kMaxText = 400;  // 800 hexadecimal digits; PMI implementations in use accept 1024 or more
constexpr const char* kStoreAddressKey = "lockstep-store-address";

class PmiSession {
 public:
  PmiSession(int fd, int rank, Deadline deadline) : fd_(fd), rank_(rank), deadline_(deadline) {}

  /// Sends a line and returns the reply. Throws unless the reply has cmd=`kind` and reports success.
  std::string request(const std::string& line, std::string_view kind) {
    send(line + "\n");
    std::string answer = receive();
    const std::string result = pmi_field(answer, "rc");
    if (pmi_field(answer, "cmd") != kind || (!result.empty() && result != "0"))
      throw make_error(Cause::kProtocol, "replied " + base::quoted(answer, 200) + " to " + base::quoted(line, 80));
    return answer;
  }

 private:
  CommError make_error(Cause cause, const std::string& what) const {
    return {cause,
            "init",
            rank_,
            -1,
            "the launcher (PMI_FD is " + std::to_string(fd_) + ") " + what,
            "set LOCKSTEP_STORE=HOST:PORT, with the host of rank 0, to bypass PMI"};
  }
  CommError timeout_error() const {
    return make_error(Cause::kJoinTimeout, "did not reply in time; every rank must call lockstep::init()");
  }

  // Other processes share the descriptor, so O_NONBLOCK must not be set on it. MSG_DONTWAIT makes each call
  // non-blocking instead.
  void send(std::string_view bytes) {
    while (!bytes.empty()) {
      if (!base::net::wait_writable(fd_, deadline_)) throw timeout_error();
      const ssize_t sent = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent >= 0)
        bytes.remove_prefix(static_cast<std::size_t>(sent));
      else if (errno != EINTR && errno != EAGAIN)
        throw make_error(Cause::kCoordinatorLost, std::string("does not accept requests: ") + std::strerror(errno));
    }
  }

  /// Receives one line. No data follows it, because the launcher only sends replies.
  std::string receive() {
    std::string line;
    while (line.empty() || line.back() != '\n') {
      if (line.size() >= kMaxLine)
        throw make_error(Cause::kProtocol, "replied with a line of more than " + std::to_string(kMaxLine) + " bytes");
      if (!base::net::wait_readable(fd_, deadline_)) throw timeout_error();
      char bytes[kMaxLine];
      const ssize_t got = ::recv(fd_, bytes, kMaxLine - line.size(), MSG_DONTWAIT);
      if (got > 0)
        line.append(bytes, static_cast<std::size_t>(got));
      else if (got == 0 || (errno != EINTR && errno != EAGAIN))
        throw make_error(Cause::kCoordinatorLost,
                         std::string("does not reply: ") + (got == 0 ? "it has ended" : std::strerror(errno)));
    }
    line.pop_back();
    return line;
  }

  const int fd_;
  const int rank_;
  const Deadline deadline_;
};

}  // namespace

std::string pmi_field(std::string_view line, std::string_view name) {
  for (const std::string& word : base::split(line, ' '))
    if (word.size() > name.size() && word.starts_with(name) && word[name.size()] == '=')
      return word.substr(name.size() + 1);
  return "";
}

std::string pmi_broadcast(int fd, int rank, std::string_view text, Deadline deadline) {
  LOCKSTEP_CHECK(text.size() <= kMaxText);
  PmiSession session(fd, rank, deadline);
  session.request("cmd=init pmi_version=1 pmi_subversion=1", "response_to_init");
  const std::string table = "kvsname=" + pmi_field(session.request("cmd=get_my_kvsname", "my_kvsname"), "kvsname");
  const std::string entry = table + " key=" + kStoreAddressKey;
  if (rank == 0) session.request("cmd=put " + entry + " value=" + base::to_hex(text), "put_result");
  session.request("cmd=barrier_in", "barrier_out");
  std::string received =
      base::from_hex(pmi_field(session.request("cmd=get " + entry, "get_result"), "value")).value_or("");
  session.request("cmd=finalize", "finalize_ack");
  return received;
}

}  // namespace lockstep::job::identity
