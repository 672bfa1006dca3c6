// The values inside the frames of `lockstep doctor`; as in wire.h, decoding throws Error kProtocol for what encoding
// does not write, and texts of hosts are made printable.
#pragma once

#include <string>
#include <string_view>

#include "lockstep/launch/doctor/host_facts.h"
#include "lockstep/launch/doctor/link_speed.h"

namespace lockstep::launcher {

std::string encode_host_facts_request(const HostFactsRequest& order);
HostFactsRequest decode_host_facts_request(std::string_view bytes);

/// Lines of tools stay lines.
std::string encode_host_facts(const HostFacts& facts);
HostFacts decode_host_facts(std::string_view bytes);

std::string encode_listen_request(const ListenRequest& order);
ListenRequest decode_listen_request(std::string_view bytes);
std::string encode_listen_reply(const ListenReply& reply);
ListenReply decode_listen_reply(std::string_view bytes);

std::string encode_measure_request(const MeasureRequest& order);
MeasureRequest decode_measure_request(std::string_view bytes);
std::string encode_link_speed(const LinkSpeed& speed);
LinkSpeed decode_link_speed(std::string_view bytes);

}  // namespace lockstep::launcher
