#include "lockstep/launch/agent/agent_setup.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <optional>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/net/socket.h"
#include "lockstep/launch/protocol/connectivity_probe.h"
#include "lockstep/launch/cli/interface_filter.h"
#include "lockstep/launch/doctor/doctor_responder.h"

namespace lockstep::launcher {
namespace {

using base::Deadline;
using namespace std::chrono_literals;

constexpr auto kJobComes = 600s;  // the other hosts may be slow to answer
constexpr auto kConnects = 5s;
constexpr auto kOtherWays = 300ms;  // after the first that was found

struct LauncherIsGone {};

void say(FrameKind kind, const std::string& payload) {
  const std::string bytes = encode({kind, -1, payload});
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t size = ::write(STDOUT_FILENO, bytes.data() + done, bytes.size() - done);
    if (size < 0 && errno != EINTR) throw LauncherIsGone();
    done += static_cast<std::size_t>(std::max<ssize_t>(size, 0));
  }
}

/// An agent's part in meet().
class Guest {
 public:
  std::vector<pollfd> entries() const { return crossing_ ? crossing_->entries() : std::vector<pollfd>(); }
  void handle(const std::vector<pollfd>& entries) {
    if (crossing_) crossing_->handle(entries);
  }
  void meet(MeetOrder order);
  void probe(const ProbeOrder& order);
  Deadline deadline() const { return deadline_; }
  /// Answers when it is time to.
  void look();
  base::Fd take_tether() { return std::move(tether_); }

 private:
  struct Way {
    int launcher = 0;
    std::size_t dialled = 0;
  };
  void answer_meet();
  void answer_probe();

  enum class Doing { kNothing, kMeeting, kProbing } doing_ = Doing::kNothing;
  MeetOrder order_;
  std::vector<base::InterfaceAddress> own_;
  std::vector<Way> ways_;
  std::optional<Crossing> crossing_;
  std::size_t first_probe_ = 0;  // in crossing_->dialled()
  base::Fd tether_;
  Deadline deadline_ = Deadline::never();
};

bool same_family(const std::string& a, const std::string& b) {
  return (a.find(':') == std::string::npos) == (b.find(':') == std::string::npos);
}

void Guest::meet(MeetOrder order) {
  order_ = std::move(order);
  own_ = base::interface_addresses();
  std::erase_if(own_, [](const base::InterfaceAddress& one) {
    return one.loopback || one.address.find('%') != std::string::npos;
  });
  crossing_.emplace(order_.self, order_.token);
  const InterfaceChoice choice =
      order_.interface.empty() ? InterfaceChoice() : parse_interface_choice("--interface", order_.interface);
  for (std::size_t i = 0; i < order_.launcher.size(); ++i) {
    std::vector<std::string> sources = choice ? std::vector<std::string>() : std::vector<std::string>{""};
    for (const base::InterfaceAddress& own : own_)
      if (choice && same_family(own.address, order_.launcher[i].host) && allows(choice, own.interface, own.address))
        sources.push_back(own.address);
    for (const std::string& source : sources) {
      ways_.push_back({static_cast<int>(i), crossing_->dialled().size()});
      crossing_->dial(order_.launcher[i], -1, source);
    }
  }
  doing_ = Doing::kMeeting;
  deadline_ = Deadline::in(kConnects);
}

void Guest::answer_meet() {
  MeetReply reply;
  std::string tried;
  for (const Way& way : ways_) {
    const Crossing::Dialled& dialled = crossing_->dialled()[way.dialled];
    const std::string& target = order_.launcher[static_cast<std::size_t>(way.launcher)].host;
    if (!dialled.fd) {
      tried += (tried.empty() ? "" : "; ") + target + ": " + dialled.error;
      continue;
    }
    const auto own = std::find_if(own_.begin(), own_.end(),
                                  [&](const base::InterfaceAddress& one) { return one.address == dialled.from; });
    reply.doors.push_back({way.launcher, static_cast<std::uint32_t>(way.dialled), crossing_->listen(dialled.from),
                           own == own_.end() ? "" : own->interface});
  }
  std::string has;
  for (const base::InterfaceAddress& one : own_) has += (has.empty() ? "" : ", ") + one.interface + " " + one.address;
  if (reply.doors.empty())
    reply.error = ways_.empty() ? "no address of its own fits --interface " + base::quoted(order_.interface, 80) +
                                      "; it has " + has
                                : tried + "; its own addresses are " + has;
  say(FrameKind::kMet, encode_met(reply));
}

void Guest::probe(const ProbeOrder& order) {
  if (!crossing_) throw base::Error(base::Cause::kProtocol, "a probe before the meeting");
  for (const Way& way : ways_)
    if (way.launcher == order.launcher && !tether_ && crossing_->dialled()[way.dialled].fd)
      tether_ = std::move(crossing_->dialled()[way.dialled].fd);
  first_probe_ = crossing_->dialled().size();
  base::allow_files(2 * order.peers.size() + 64);
  for (std::size_t node = 0; node < order.peers.size(); ++node)
    crossing_->dial(order.peers[node], static_cast<int>(node));
  doing_ = Doing::kProbing;
  deadline_ = Deadline::in(kConnects);
}

void Guest::answer_probe() {
  std::vector<ProbeFailure> failures;
  for (std::size_t i = first_probe_; i < crossing_->dialled().size(); ++i) {
    Crossing::Dialled& dialled = crossing_->dialled()[i];
    if (!dialled.fd) failures.push_back({static_cast<int>(i - first_probe_), dialled.error});
    dialled.fd.reset();
  }
  say(FrameKind::kProbed, encode_probed(failures));
}

void Guest::look() {
  if (doing_ == Doing::kNothing) return;
  const auto& dialled = crossing_->dialled();
  if (doing_ == Doing::kMeeting && std::any_of(dialled.begin(), dialled.end(), [](const Crossing::Dialled& one) {
        return static_cast<bool>(one.fd) && one.decided;
      }))
    deadline_ = earlier(deadline_, Deadline::in(kOtherWays));
  if (!crossing_->all_decided() && !deadline_.expired()) return;
  crossing_->give_up();
  if (doing_ == Doing::kMeeting)
    answer_meet();
  else
    answer_probe();
  doing_ = Doing::kNothing;
  deadline_ = Deadline::never();  // bounded: nothing is waited for
}

}  // namespace

std::optional<AgentStart> start_of_agent(FrameReader& input) try {
  AgentStart start;
  start.master_port = base::reserve_port({"0.0.0.0", 0});  // nobody listens; a program that meets there binds it too
  Site site = look_around();
  site.master_port = base::local_address(start.master_port.get()).port;
  say(FrameKind::kSite, encode_site(site));

  Guest guest;
  Patient patient(say, STDIN_FILENO);
  const Deadline deadline = Deadline::in(kJobComes);
  char bytes[1 << 16];
  for (;;) {
    std::vector<pollfd> entries = guest.entries();
    entries.push_back({STDIN_FILENO, POLLIN, 0});
    ::poll(entries.data(), entries.size(), earlier(deadline, guest.deadline()).poll_ms());
    if (deadline.expired()) throw base::Error(base::Cause::kProtocol, "the agent got no job");
    const bool told = entries.back().revents != 0;
    entries.pop_back();
    guest.handle(entries);
    guest.look();
    if (!told) continue;
    const ssize_t size = ::read(STDIN_FILENO, bytes, sizeof bytes);
    if (size == 0) throw LauncherIsGone();
    if (size > 0) input.feed({bytes, static_cast<std::size_t>(size)});
    while (const auto frame = input.next()) {
      if (frame->kind == FrameKind::kMeet)
        guest.meet(decode_meet(frame->payload));
      else if (frame->kind == FrameKind::kProbe)
        guest.probe(decode_probe(frame->payload));
      else if (patient.take(*frame))
        continue;
      else if (frame->kind != FrameKind::kJob)
        throw base::Error(base::Cause::kProtocol, "a frame that is no job");
      else {
        start.job = decode_job(frame->payload);
        start.tether = guest.take_tether();
        return start;
      }
    }
  }
} catch (const LauncherIsGone&) {
  return std::nullopt;
}

}  // namespace lockstep::launcher
