// Prints the output of the ranks, the launcher's own notes and, at the end, the cause of a failure.
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
#include "lockstep/launch/output/traceback_filter.h"

namespace lockstep::launcher::output {

/// A stream of a rank: stdout or stderr.
enum class Stream { kOut = 0, kErr = 1 };

/// Returns the width of the terminal on stdout; 0 if stdout is not a terminal, or one that cannot redraw a row.
int terminal_columns();

/// Prints on stdout and stderr, and writes the files of --output. Only finish() waits for the terminal or the disk. Not
/// thread-safe.
class Output {
 public:
  /// `prefixes` has the prefix of each rank's lines. Creates options.output_dir and its files. Throws a SystemError
  /// that names --output and the file.
  Output(const cli::RunOptions& options, std::vector<std::string> prefixes);

  /// Prints and stores bytes that `rank` has written to a stream. Ignores unknown ranks.
  void add(int rank, Stream stream, std::string_view bytes);
  /// Prints the unfinished last line of `rank`. Call it when the process of the rank has ended.
  void close_rank(int rank);
  /// From now on, tracebacks of KeyboardInterrupt are not printed: every rank of a Python program ends with one after
  /// Ctrl-C. The files of --output have them.
  void hide_interrupts() { hides_interrupts_ = true; }
  /// A descriptor that becomes readable when output cannot be written; take_reader_closed() resets it.
  int failure_fd() const { return failures_.get(); }
  /// Returns whether the reader of stdout has closed it.
  bool take_reader_closed();
  /// Prints "lockstep: TEXT" on stderr.
  void print_note(std::string_view text);
  /// Returns the last lines that `rank` has written to stderr, at most 20, each with its prefix and a newline.
  std::string tail(int rank) const;
  const std::string& prefix(int rank) const { return ranks_.at(static_cast<std::size_t>(rank)).prefix; }
  /// Prints `last` on stderr, after all other output. Blocks until all output is written, but for at most 1 s without
  /// progress and 10 s in total, each for the files, stdout and stderr. Before `last`, prints a warning if lines were
  /// dropped or stdout could not be written. Returns whether stdout has everything, apart from dropped lines.
  bool finish(const std::string& last);

 private:
  /// A terminal or file to print to. stdout and stderr share one Destination if they are the same file.
  struct Destination {
    int fd;
    ConsoleRenderer renderer;
    BackgroundWriter writer;
    Destination(int descriptor, int failure_fd);
  };
  struct RankOutput {
    std::string prefix;
    LineSplitter splitters[2];
    TracebackFilter tracebacks;
    base::Fd files[2];
    std::deque<std::string> tail;
  };

  void print(int rank, Stream stream, const std::vector<LineSegment>& segments);
  bool report_lost_output();
  void keep_tail(RankOutput& output, const LineSegment& segment);
  Destination& destination(Stream stream) { return stream == Stream::kErr && err_ ? *err_ : *out_; }

  const base::Fd failures_;  // an eventfd that the writers signal
  bool only_rank_zero_;
  bool hides_interrupts_ = false;
  std::string directory_;
  std::vector<RankOutput> ranks_;
  std::unique_ptr<Destination> out_;
  std::unique_ptr<Destination> err_;  // null if it is the same file as out_
  std::unique_ptr<BackgroundWriter> disk_;
};

}  // namespace lockstep::launcher::output
