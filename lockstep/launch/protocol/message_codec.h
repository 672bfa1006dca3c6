// Encodes and decodes messages from one list of their fields.
//
// For each message there is a function `fields(message, field)`, in the namespace of the message or in this one, that
// calls field(member) for every member. MessageWriter and MessageReader are such fields, so that both directions have
// one order. Numbers are little-endian in their own size; texts and lists follow their length.
#pragma once

#include <array>
#include <bit>
#include <chrono>
#include <concepts>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "lockstep/base/byte_codec.h"
#include "lockstep/base/net/socket.h"
#include "lockstep/base/telemetry/rank_page.h"

namespace lockstep::launcher::protocol {

/// Begins the message of each error about a frame that this program would not have written.
inline constexpr std::string_view kProtocolSubject = "launcher and agent";
/// Throws Error kProtocol. `what` describes such a frame.
[[noreturn]] void throw_protocol_error(const std::string& what);

/// For fields(): a message of this type, const or not.
template <typename Message, typename Type>
concept Is = std::same_as<std::remove_const_t<Message>, Type>;

/// A text, or a list of texts, that keeps its bytes. All others are made printable when they are read.
template <typename Text>
struct Raw {
  Text& value;
};
template <typename Text>
Raw(Text&) -> Raw<Text>;

void fields(Is<base::net::Address> auto& address, auto& field) {
  field(address.host);
  field(address.port);
}

void fields(Is<base::net::InterfaceAddress> auto& address, auto& field) {
  field(address.interface);
  field(address.address);
  field(address.loopback);
}

template <typename T>
inline constexpr bool is_optional = false;
template <typename T>
inline constexpr bool is_optional<std::optional<T>> = true;
template <typename T>
inline constexpr bool is_list = false;
template <typename T>
inline constexpr bool is_list<std::vector<T>> = true;
template <typename T, std::size_t size>
inline constexpr bool is_list<std::array<T, size>> = true;

class MessageWriter {
 public:
  template <typename T>
  void operator()(const T& value) {
    if constexpr (std::is_same_v<T, bool>) {
      base::put_number(bytes_, static_cast<std::uint8_t>(value));
    } else if constexpr (std::is_integral_v<T>) {
      base::put_number(bytes_, value);
    } else if constexpr (std::is_same_v<T, double>) {
      base::put_number(bytes_, std::bit_cast<std::uint64_t>(value));
    } else if constexpr (std::is_same_v<T, std::chrono::milliseconds>) {
      base::put_number(bytes_, std::int64_t{value.count()});
    } else if constexpr (std::is_same_v<T, std::string>) {
      base::put_text(bytes_, value);
    } else if constexpr (is_optional<T>) {
      (*this)(value.has_value());
      if (value) (*this)(*value);
    } else if constexpr (is_list<T>) {
      if constexpr (requires(T list) { list.clear(); })
        base::put_number(bytes_, static_cast<std::uint32_t>(value.size()));
      for (const auto& item : value) (*this)(item);
    } else {
      fields(value, *this);
    }
  }
  template <typename Text>
  void operator()(Raw<Text> text) {
    (*this)(text.value);
  }
  /// An enumerator.
  template <typename Enum>
  void operator()(const Enum& value, Enum /*last*/) {
    base::put_number(bytes_, value);
  }

  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

template <typename Message>
std::string encoded(const Message& message) {
  MessageWriter writer;
  writer(message);
  return writer.take();
}

/// Throws Error kProtocol, before it allocates memory, for bytes that MessageWriter does not write.
class MessageReader {
 public:
  explicit MessageReader(std::string_view bytes) : reader_(bytes, kProtocolSubject) {}

  template <typename T>
  void operator()(T& value) {
    if constexpr (std::is_same_v<T, bool>) {
      value = reader_.number<std::uint8_t>() != 0;
    } else if constexpr (std::is_integral_v<T>) {
      value = reader_.number<T>();
    } else if constexpr (std::is_same_v<T, double>) {
      value = std::bit_cast<double>(reader_.number<std::uint64_t>());
    } else if constexpr (std::is_same_v<T, std::chrono::milliseconds>) {
      value = std::chrono::milliseconds(reader_.number<std::int64_t>());
    } else if constexpr (std::is_same_v<T, std::string>) {
      value = base::telemetry::printable(reader_.text());
    } else if constexpr (is_optional<T>) {
      bool has_value = false;
      (*this)(has_value);
      if (has_value) (*this)(value.emplace());
    } else if constexpr (is_list<T>) {
      if constexpr (requires { value.clear(); }) value.resize(reader_.count(encoded(typename T::value_type()).size()));
      for (auto& item : value) (*this)(item);
    } else {
      fields(value, *this);
    }
  }
  void operator()(Raw<std::string> text) { text.value = reader_.text(); }
  void operator()(Raw<std::vector<std::string>> texts) { texts.value = reader_.texts(); }
  template <typename Enum>
  void operator()(Enum& value, Enum last) {
    const auto number = reader_.number<std::underlying_type_t<Enum>>();
    if (number < 0 || number > static_cast<std::underlying_type_t<Enum>>(last))
      throw_protocol_error("the enumerator " + std::to_string(number) + "; expected at most " +
                           std::to_string(static_cast<std::underlying_type_t<Enum>>(last)));
    value = static_cast<Enum>(number);
  }

  /// The next `size` bytes, as they are.
  std::string_view bytes(std::size_t size) { return reader_.bytes(size); }
  /// Throws if bytes have not been read.
  void end() const { reader_.end(); }

 private:
  base::ByteReader reader_;
};

template <typename Message>
Message decoded(std::string_view bytes) {
  MessageReader reader(bytes);
  Message message;
  reader(message);
  reader.end();
  return message;
}

}  // namespace lockstep::launcher::protocol
