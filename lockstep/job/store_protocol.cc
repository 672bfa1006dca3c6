#include "lockstep/job/store_protocol.h"

namespace lockstep::job::wire {

std::string hello(const Credentials& credentials, int rank, const Mac& nonce) {
  std::string text(kMagic);
  put(text, kProtocol);
  put(text, static_cast<std::uint8_t>(credentials.job.size()));
  text += credentials.job;
  put(text, static_cast<std::int32_t>(credentials.generation));
  put(text, static_cast<std::int32_t>(rank));
  text += bytes_of(nonce);
  return text;
}

// A hello says its own length, and what stands before it and behind it has a fixed one.
Handshake handshake(const JobKey& key, std::string_view hello, std::string_view challenge) {
  return {.of_server = key.mac({"store:", hello, challenge}),
          .of_client = key.mac({"rank::", hello, challenge}),
          .key = JobKey(bytes_of(key.mac({"frames", hello, challenge})))};
}

std::optional<std::size_t> take_length(std::string_view bytes) {
  Reader reader(bytes);
  const auto length = reader.take<std::uint32_t>();
  const auto complement = reader.take<std::uint32_t>();
  if (!reader.ok() || complement != ~length || length > kMaxFrame) return std::nullopt;
  return length;
}

Mac Seal::next(std::string_view body) {
  std::string head(1, direction_);
  put(head, number_++);
  return key_.mac({head, body});
}

std::string Seal::close(std::string_view body) {
  std::string frame;
  frame.reserve(kLength + body.size() + kMac);
  put_length(frame, body.size());
  frame += body;
  frame += bytes_of(next(body));
  return frame;
}

}  // namespace lockstep::job::wire
