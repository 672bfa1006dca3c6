// Prints the output of the ranks, the launcher's own notes and, at the end, the cause of a failure.
#pragma once

#include <chrono>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/fd.h"
#include "lockstep/launch/cli/command_line.h"
#include "lockstep/launch/output/background_writer.h"
#include "lockstep/launch/output/console_renderer.h"

namespace lockstep::launcher::output {

/// Returns the width of the terminal on stdout; 0 if stdout is not a terminal, or one that cannot redraw a row.
int terminal_columns();

/// Prints on stdout and stderr, and writes the files of --output. A terminal that is too slow loses lines. Files and
/// pipes get everything: bytes that wait for them are not acknowledged, so that the ranks wait too. Only finish()
/// blocks. Not thread-safe.
class Output {
 public:
  /// `prefixes` has the prefix of each rank's lines; `window` is JobPlan::output_window. Creates options.output_dir and
  /// its files. Throws a SystemError that names --output and the file.
  Output(const cli::RunOptions& options, std::vector<std::string> prefixes, std::size_t window);

  /// Prints and stores bytes that `rank` has written to a stream. Ignores unknown ranks.
  void add(int rank, Stream stream, std::string_view bytes);
  /// Prints the unfinished last line of `rank`. Call it when the process of the rank has ended.
  void close_rank(int rank);
  /// From now on, tracebacks of KeyboardInterrupt are not printed: every rank of a Python program ends with one after
  /// Ctrl-C. The files of --output have them.
  void hide_interrupts() { hides_interrupts_ = true; }
  OutputAcks& acks() { return acks_; }
  /// A descriptor that becomes readable when output cannot be written; call check_failures() then.
  int failure_fd() const { return failures_.get(); }
  /// Prints a warning, once, if stdout or the files cannot be written. Returns whether the reader of stdout has closed
  /// it.
  bool check_failures();
  /// From now on, drop_stalled() drops output: the user has stopped the job.
  void allow_drops() { may_drop_ = true; }
  /// Returns when drop_stalled() must be called.
  base::Deadline next_drop() const { return may_drop_ ? base::Deadline::in(kDropInterval) : base::Deadline::never(); }
  /// After allow_drops(), drops the output for a pipe or terminal that has taken nothing for one second, so that ranks
  /// that wait for it can end.
  void drop_stalled() {
    for (const auto& to : destinations_) drop_if_stalled(*to);
  }
  /// Prints "lockstep: TEXT" on stderr.
  void print_note(std::string_view text);
  /// Returns the last lines that `rank` has written to stderr, at most 20, each with its prefix and a newline.
  std::string tail(int rank) const;
  const std::string& prefix(int rank) const { return ranks_.at(static_cast<std::size_t>(rank)).prefix; }
  /// Prints `last` on stderr, after all other output, and blocks until everything is written: for a terminal at most
  /// 1 s without progress and 12 s in total; for files and pipes until `is_interrupted`, called every 50 ms, returns
  /// true. If they take longer than 2 s, or nothing for 1 s, `last` is printed before the rest of them. Prints a
  /// warning if lines were dropped. Returns whether stdout and the files have everything.
  bool finish(const std::string& last, const std::function<bool()>& is_interrupted);

 private:
  static constexpr std::chrono::milliseconds kDropInterval{250};
  /// A terminal or file to print to. stdout and stderr share one Destination if they are the same file.
  struct Destination {
    int fd;
    bool is_terminal, is_file;
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

  void print(int rank, Stream stream, const std::vector<LineSegment>& segments, std::shared_ptr<void> receipt = {});
  bool drop_if_stalled(Destination& to);
  std::vector<BackgroundWriter*> writers();
  bool wait_for_readers(const std::function<bool()>& is_interrupted);
  /// Warns of dropped lines beyond `known`. Returns how many lines have been dropped.
  std::int64_t warn_about_dropped_lines(std::int64_t known);
  Destination& destination(Stream stream) {
    return stream == Stream::kOut ? *destinations_.front() : *destinations_.back();
  }

  const base::Fd failures_;  // an eventfd that the writers signal
  OutputAcks acks_;
  bool only_rank_zero_;
  bool may_drop_ = false;
  bool has_warned_of_stdout_ = false, has_warned_of_files_ = false;
  bool hides_interrupts_ = false;
  std::string directory_;
  std::vector<RankOutput> ranks_;
  std::vector<std::unique_ptr<Destination>> destinations_;  // stdout, and stderr unless it is the same file
  std::unique_ptr<BackgroundWriter> disk_;
};

}  // namespace lockstep::launcher::output
