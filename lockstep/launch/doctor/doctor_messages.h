// The values inside the frames of `lockstep doctor`; as in wire.h, decoding throws Error kProtocol for what encoding
// does not write, and texts of hosts are made printable.
#pragma once

#include <string>
#include <string_view>

#include "lockstep/launch/doctor/host_facts.h"
#include "lockstep/launch/doctor/link_speed.h"

namespace lockstep::launcher {

std::string encode_examine(const ExamineOrder& order);
ExamineOrder decode_examine(std::string_view bytes);

/// Lines of tools stay lines.
std::string encode_examined(const Examination& found);
Examination decode_examined(std::string_view bytes);

std::string encode_listen(const ListenOrder& order);
ListenOrder decode_listen(std::string_view bytes);
std::string encode_listening(const ListenReply& reply);
ListenReply decode_listening(std::string_view bytes);

std::string encode_measure(const MeasureOrder& order);
MeasureOrder decode_measure(std::string_view bytes);
std::string encode_measured(const PairSpeed& speed);
PairSpeed decode_measured(std::string_view bytes);

}  // namespace lockstep::launcher
