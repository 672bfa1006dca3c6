// Encodes and decodes the payloads of the frames of `lockstep doctor`. As in frames.h, decode_X() throws Error
// kProtocol for anything that encode_X() does not write. It makes the texts of hosts printable.
#pragma once

#include <string>
#include <string_view>

#include "lockstep/launch/doctor/host_facts.h"
#include "lockstep/launch/doctor/link_speed.h"

namespace lockstep::launcher::doctor {

std::string encode_host_facts_request(const HostFactsRequest& request);
HostFactsRequest decode_host_facts_request(std::string_view bytes);

/// Decoding keeps line breaks in the output of tools.
std::string encode_host_facts(const HostFacts& facts);
HostFacts decode_host_facts(std::string_view bytes);

std::string encode_listen_request(const ListenRequest& request);
ListenRequest decode_listen_request(std::string_view bytes);
std::string encode_listen_reply(const ListenReply& reply);
ListenReply decode_listen_reply(std::string_view bytes);

std::string encode_measure_request(const MeasureRequest& request);
MeasureRequest decode_measure_request(std::string_view bytes);
std::string encode_link_speed(const LinkSpeed& speed);
LinkSpeed decode_link_speed(std::string_view bytes);

}  // namespace lockstep::launcher::doctor
