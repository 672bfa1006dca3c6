#include "lockstep/job/store_protocol.h"

namespace lockstep::job::store_protocol {

std::string make_hello(const Credentials& credentials, int rank, const Mac& nonce) {
  std::string text(kMagic);
  base::put_number(text, kProtocol);
  base::put_number(text, static_cast<std::uint8_t>(credentials.job.size()));
  text += credentials.job;
  base::put_number(text, static_cast<std::int32_t>(credentials.generation));
  base::put_number(text, static_cast<std::int32_t>(rank));
  text += mac_bytes(nonce);
  return text;
}

// The concatenations are unambiguous: a hello contains its own length, and the other parts have fixed lengths.
Handshake derive_handshake(const JobKey& key, std::string_view hello, std::string_view challenge) {
  return {.server_proof = key.mac({"store:", hello, challenge}),
          .client_proof = key.mac({"rank::", hello, challenge}),
          .key = JobKey(mac_bytes(key.mac({"frames", hello, challenge})))};
}

std::optional<std::size_t> parse_length(std::string_view bytes) {
  base::ByteReader reader(bytes, kSubject);
  const auto length = reader.number<std::uint32_t>();
  const auto complement = reader.number<std::uint32_t>();
  if (complement != ~length || length > kMaxFrameBytes) return std::nullopt;
  return length;
}

Mac FrameAuthenticator::next_mac(std::string_view body) {
  std::string head(1, direction_);
  base::put_number(head, number_++);
  return key_.mac({head, body});
}

std::string FrameAuthenticator::make_frame(std::string_view body) {
  std::string frame;
  frame.reserve(kLengthBytes + body.size() + kMacBytes);
  put_length(frame, body.size());
  frame += body;
  frame += mac_bytes(next_mac(body));
  return frame;
}

}  // namespace lockstep::job::store_protocol
