#include "lockstep/launch/doctor/doctor_responder.h"

#include <poll.h>

#include <chrono>

#include "lockstep/base/error.h"
#include "lockstep/launch/protocol/connectivity_probe.h"
#include "lockstep/launch/doctor/doctor_messages.h"

namespace lockstep::launcher {
namespace {

using base::Deadline;
using namespace std::chrono_literals;

constexpr auto kConnects = 5s;
constexpr auto kMeasures = 5s;  // beside the second of round trips and that of bytes, for a slow network

/// Polls the crossing, and `also` if it is no -1. False when that became readable, or at the deadline.
bool turn(Crossing& crossing, int also, Deadline deadline) {
  std::vector<pollfd> entries = crossing.entries();
  entries.push_back({also, POLLIN, 0});
  ::poll(entries.data(), entries.size(), deadline.poll_ms());
  const bool told = entries.back().revents != 0;
  entries.pop_back();
  crossing.handle(entries);
  return !told && !deadline.expired();
}

}  // namespace

void Patient::tell_time() const {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  say_(FrameKind::kClock, encode_numbers({std::chrono::duration_cast<std::chrono::nanoseconds>(now).count()}));
}

void Patient::listen(const std::string& payload) const {
  const ListenOrder order = decode_listen(payload);
  Crossing crossing(order.self, order.token);
  ListenReply reply;
  try {
    reply.address = crossing.listen(order.host);
  } catch (const base::Error& error) {
    reply.error = error.what();
  }
  say_(FrameKind::kListening, encode_listening(reply));
  if (!reply.error.empty()) return;
  base::Fd caller;
  const Deadline deadline = Deadline::in(kConnects);
  do caller = crossing.take_caller(order.caller, 0, 0);
  while (!caller && turn(crossing, input_, deadline));
  if (!caller) return;
  try {
    serve_pair(caller.get(), Deadline::in(kMeasures));
  } catch (const base::Error&) {
    // The caller tells.
  }
}

void Patient::measure(const std::string& payload) const {
  const MeasureOrder order = decode_measure(payload);
  PairSpeed speed;
  try {
    Crossing crossing(order.self, order.token);
    crossing.dial(order.address, order.peer);
    const Deadline deadline = Deadline::in(kConnects);
    while (!crossing.all_decided() && turn(crossing, -1, deadline)) {
    }
    crossing.give_up();
    Crossing::Dialled& way = crossing.dialled().front();
    if (way.fd)
      speed = measure_pair(way.fd.get(), Deadline::in(kMeasures));
    else
      speed.error = way.error;
  } catch (const base::Error& error) {
    speed.error = error.what();
  }
  say_(FrameKind::kMeasured, encode_measured(speed));
}

bool Patient::take(const Frame& frame) {
  switch (frame.kind) {
    case FrameKind::kTime: tell_time(); return true;
    case FrameKind::kExamine:
      say_(FrameKind::kExamined, encode_examined(examine(decode_examine(frame.payload), input_)));
      return true;
    case FrameKind::kListen: listen(frame.payload); return true;
    case FrameKind::kMeasure: measure(frame.payload); return true;
    default: return false;
  }
}

}  // namespace lockstep::launcher
