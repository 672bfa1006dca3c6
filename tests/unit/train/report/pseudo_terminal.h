// A terminal for tests: what a person sees of what programs write.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/base/fd.h"
#include "lockstep/base/utf8.h"

namespace lockstep::tests {

/// While it lives, stdout and stderr of this process are a pseudo-terminal of so many columns. It knows \r, \n, ESC [
/// K, and rows that are full.
class PseudoTerminal {
 public:
  explicit PseudoTerminal(int columns) {
    int ours = -1, theirs = -1;
    if (::openpty(&ours, &theirs, nullptr, nullptr, nullptr) != 0) throw std::runtime_error("no pseudo-terminal");
    ours_.reset(ours);
    ::fcntl(ours, F_SETFL, O_NONBLOCK);
    resize(columns);
    std::fflush(stdout);
    before_[0].reset(::dup(STDOUT_FILENO));
    before_[1].reset(::dup(STDERR_FILENO));
    ::dup2(theirs, STDOUT_FILENO);
    ::dup2(theirs, STDERR_FILENO);
    ::close(theirs);
  }
  ~PseudoTerminal() {
    std::fflush(stdout);
    ::dup2(before_[0].get(), STDOUT_FILENO);
    ::dup2(before_[1].get(), STDERR_FILENO);
    for (const std::string& row : testing::Test::HasFailure() ? rows() : std::vector<std::string>())
      std::printf("terminal: %s\n", row.c_str());
  }
  PseudoTerminal(const PseudoTerminal&) = delete;
  PseudoTerminal& operator=(const PseudoTerminal&) = delete;

  /// What has no room is cut off, as xterm does it.
  void resize(int columns) {
    rows();
    columns_ = static_cast<std::size_t>(columns);
    for (auto& row : screen_)
      if (row.size() > columns_) row.resize(columns_);
    column_ = std::min(column_, columns_);
    winsize size{};
    size.ws_col = static_cast<unsigned short>(columns);
    size.ws_row = 24;
    ::ioctl(ours_.get(), TIOCSWINSZ, &size);
  }

  /// Rows from the top, without blanks at their ends; the last one is the cursor's.
  const std::vector<std::string>& rows() {
    char bytes[65536];
    for (ssize_t size = 0; (size = ::read(ours_.get(), bytes, sizeof bytes)) > 0;)
      received_.append(bytes, static_cast<std::size_t>(size));
    interpret(std::exchange(received_, {}));
    text_.clear();
    for (const auto& row : screen_) {
      std::string& text = text_.emplace_back();
      for (const std::string& glyph : row) text += glyph;
      text.erase(text.find_last_not_of(' ') + 1);
    }
    return text_;
  }

 private:
  void interpret(std::string_view bytes) {
    while (!bytes.empty()) {
      std::size_t size = 1;
      if (bytes.starts_with("\x1b[K")) {
        size = 3;
        if (screen_.back().size() > column_) screen_.back().resize(column_);
      } else if (bytes[0] == '\r') {
        column_ = 0;
      } else if (bytes[0] == '\n') {
        screen_.emplace_back();
      } else {
        size = base::utf8_length(bytes);
        if (size == 0) throw std::runtime_error("the terminal got half a character");
        put(bytes.substr(0, size));
      }
      bytes.remove_prefix(size);
    }
  }
  void put(std::string_view character) {
    if (column_ >= columns_) {
      screen_.emplace_back();
      column_ = 0;
    }
    auto& row = screen_.back();
    if (row.size() <= column_) row.resize(column_ + 1, " ");
    row[column_++] = character;
  }

  base::Fd ours_;
  base::Fd before_[2];
  std::string received_;
  std::size_t columns_ = 0;
  std::size_t column_ = 0;
  std::vector<std::vector<std::string>> screen_{1};
  std::vector<std::string> text_;
};

}  // namespace lockstep::tests
