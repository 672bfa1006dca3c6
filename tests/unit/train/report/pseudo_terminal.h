// A pseudo-terminal for tests, with the text that it displays.
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

/// Redirects stdout and stderr of this process to a pseudo-terminal of `columns` columns while it exists. It interprets
/// \r, \n, ESC [ K, and wraps full rows.
class PseudoTerminal {
 public:
  explicit PseudoTerminal(int columns) {
    int controller = -1, terminal = -1;
    if (::openpty(&controller, &terminal, nullptr, nullptr, nullptr) != 0)
      throw std::runtime_error("cannot open a pseudo-terminal");
    controller_.reset(controller);
    ::fcntl(controller, F_SETFL, O_NONBLOCK);
    resize(columns);
    std::fflush(stdout);
    before_[0].reset(::dup(STDOUT_FILENO));
    before_[1].reset(::dup(STDERR_FILENO));
    ::dup2(terminal, STDOUT_FILENO);
    ::dup2(terminal, STDERR_FILENO);
    ::close(terminal);
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

  /// Truncates rows that are too long, as xterm does.
  void resize(int columns) {
    rows();
    columns_ = static_cast<std::size_t>(columns);
    for (auto& row : screen_)
      if (row.size() > columns_) row.resize(columns_);
    column_ = std::min(column_, columns_);
    winsize size{};
    size.ws_col = static_cast<unsigned short>(columns);
    size.ws_row = 24;
    ::ioctl(controller_.get(), TIOCSWINSZ, &size);
  }

  /// Returns the rows from the top, without trailing spaces; the cursor is in the last one.
  const std::vector<std::string>& rows() {
    char bytes[65536];
    for (ssize_t size = 0; (size = ::read(controller_.get(), bytes, sizeof bytes)) > 0;)
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
        if (size == 0) throw std::runtime_error("the terminal received an incomplete UTF-8 character");
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

  base::Fd controller_;
  base::Fd before_[2];
  std::string received_;
  std::size_t columns_ = 0;
  std::size_t column_ = 0;
  std::vector<std::vector<std::string>> screen_{1};
  std::vector<std::string> text_;
};

}  // namespace lockstep::tests
