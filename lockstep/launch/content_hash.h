// A file's content in a few digits: equal ones are the same file.
#pragma once

#include <memory>
#include <string>
#include <string_view>

namespace lockstep::launcher {

/// XXH3 with 128 bits (Yann Collet's xxHash): no protection against somebody who wants two files to look alike.
class ContentHash {
 public:
  ContentHash();
  ~ContentHash();
  ContentHash(const ContentHash&) = delete;
  ContentHash& operator=(const ContentHash&) = delete;

  void add(std::string_view bytes);
  /// Of all that was added: 32 hexadecimal digits.
  std::string digits() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lockstep::launcher
