// All that the launcher shows: the ranks' output, its own lines, and at the end the reason of a failure.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/fd.h"
#include "lockstep/launch/cli/command_line.h"
#include "lockstep/launch/output/background_writer.h"
#include "lockstep/launch/output/console_renderer.h"
#include "lockstep/launch/output/line_splitter.h"

namespace lockstep::launcher {

enum class Stream { kOut = 0, kErr = 1 };

/// Columns of the terminal that stdout is; 0: it is none, or one that cannot redraw a line.
int terminal_columns();

/// Never waits for the terminal or the disk, but in finish().
class Output {
 public:
  /// `prefixes`: in front of each rank's lines. Makes options.output_dir and its files. Throws SystemError or
  /// UsageError naming --output and the file.
  Output(const RunOptions& options, std::vector<std::string> prefixes);

  /// Bytes that `rank` wrote to a stream.
  void add(int rank, Stream stream, std::string_view bytes);
  /// The process of `rank` has ended: a last line without a newline is shown.
  void end(int rank);
  /// "lockstep: TEXT" on stderr.
  void print_note(std::string_view text);
  /// The last lines that `rank` wrote to stderr, at most 20, each with its prefix and newline.
  std::string tail(int rank) const;
  const std::string& prefix(int rank) const { return ranks_.at(static_cast<std::size_t>(rank)).prefix; }
  /// Shows `last` on stderr, after everything else. Waits for the terminal 1 s after its last sign of life, 10 s at
  /// most.
  void finish(const std::string& last);

 private:
  /// One place where lines go. stdout and stderr share one when they are the same terminal or file.
  struct Destination {
    int fd;
    ConsoleRenderer renderer;
    BackgroundWriter writer;
    explicit Destination(int descriptor);
  };
  struct RankOutput {
    std::string prefix;
    LineSplitter lines[2];
    base::Fd files[2];
    std::deque<std::string> tail;
  };

  void show(int rank, Stream stream, const std::vector<LineSegment>& segments);
  void keep_tail(RankOutput& output, const LineSegment& segment);
  Destination& destination(Stream stream) { return stream == Stream::kErr && err_ ? *err_ : *out_; }

  bool only_rank_zero_;
  std::string directory_;
  std::vector<RankOutput> ranks_;
  std::unique_ptr<Destination> out_;
  std::unique_ptr<Destination> err_;  // none: the same as out_
  std::unique_ptr<BackgroundWriter> disk_;
};

}  // namespace lockstep::launcher
