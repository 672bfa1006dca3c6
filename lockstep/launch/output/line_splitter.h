// A stream of bytes, cut into what may be shown on its own.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::launcher {

/// How a piece of output ended.
enum class PieceEnd {
  kNewline,  ///< a whole line
  kReturn,   ///< a progress bar: the next piece is written over it
  kCut,      ///< the line is too long, and goes on in the next piece
  kOpen,     ///< a progress bar that began with \r and may still grow; the next piece repeats what it holds
};

struct Piece {
  std::string text;  ///< without its \n or \r
  PieceEnd end = PieceEnd::kNewline;
  bool continues = false;  ///< the piece before was cut
  bool over_bar = false;   ///< a progress bar of this stream stands on the row
};

/// Two styles of progress bars are in use: text then \r, and \r then text (tqdm). "\r\n" is one end of line.
class LineSplitter {
 public:
  static constexpr std::size_t kMaxLine = std::size_t{64} << 10;

  /// The pieces that `bytes` complete, in order.
  std::vector<Piece> feed(std::string_view bytes);
  /// What is left when the stream has ended: its last line without a newline, if there is one.
  std::vector<Piece> finish();

 private:
  void take(std::string_view text, std::vector<Piece>& pieces);
  void emit(PieceEnd end, std::vector<Piece>& pieces);

  std::string line_;       // since the last \n, \r or cut
  bool over_bar_ = false;  // the last end was \r
  bool continues_ = false;
};

}  // namespace lockstep::launcher
