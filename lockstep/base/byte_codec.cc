#include "lockstep/base/byte_codec.h"

#include "lockstep/base/error.h"

namespace lockstep::base {

void put_text(std::string& out, std::string_view text) {
  put_number(out, static_cast<std::uint32_t>(text.size()));
  out += text;
}

void put_texts(std::string& out, const std::vector<std::string>& texts) {
  put_number(out, static_cast<std::uint32_t>(texts.size()));
  for (const std::string& text : texts) put_text(out, text);
}

void ByteReader::fail(const std::string& what) const {
  throw Error(Cause::kProtocol, std::string(subject_) + ": " + what);
}

std::string_view ByteReader::bytes(std::size_t size) {
  if (size > rest_.size())
    fail("a value of " + std::to_string(size) + " bytes; expected at most " + std::to_string(rest_.size()));
  const std::string_view value = rest_.substr(0, size);
  rest_.remove_prefix(size);
  return value;
}

std::string_view ByteReader::text(std::size_t limit) {
  const auto size = number<std::uint32_t>();
  if (size > limit) fail("a text of " + std::to_string(size) + " bytes; expected at most " + std::to_string(limit));
  return bytes(size);
}

std::vector<std::string> ByteReader::texts() {
  std::vector<std::string> all(count(sizeof(std::uint32_t)));
  for (std::string& entry : all) entry = text();
  return all;
}

std::size_t ByteReader::count(std::size_t min_bytes) {
  const auto n = number<std::uint32_t>();
  if (n > rest_.size() / min_bytes)
    fail("a list of " + std::to_string(n) + " elements in " + std::to_string(rest_.size()) + " bytes");
  return n;
}

void ByteReader::end() const {
  if (!rest_.empty()) fail(std::to_string(rest_.size()) + " unexpected bytes at the end");
}

}  // namespace lockstep::base
