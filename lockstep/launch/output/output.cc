#include "lockstep/launch/output/output.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"

namespace lockstep::launcher::output {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kTerminalLimit = std::size_t{8} << 20;
constexpr std::size_t kDiskLimit = std::size_t{64} << 20;
constexpr std::size_t kTailLines = 20;
constexpr std::size_t kTailLineBytes = 4096;

bool can_redraw(int fd) {
  const auto& term = base::Env::this_process().term;
  return ::isatty(fd) == 1 && !(term && *term == "dumb");
}

bool same_file(int a, int b) {
  struct stat first{}, second{};
  return ::fstat(a, &first) == 0 && ::fstat(b, &second) == 0 && first.st_dev == second.st_dev &&
         first.st_ino == second.st_ino;
}

/// Creates a file that does not exist, or opens a device or a named pipe.
base::Fd create(const std::string& path) {
  base::Fd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!fd && errno == EEXIST) {
    struct stat info{};
    if (::stat(path.c_str(), &info) != 0 || S_ISREG(info.st_mode))
      throw base::UsageError("--output: " + base::quoted(path, 256) +
                                 " exists, probably from an earlier run; expected a directory without such files",
                             "name another directory, or remove the files");
    fd.reset(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
  }
  if (!fd) throw base::SystemError("--output: cannot create " + base::quoted(path, 256), errno, base::Cause::kBadArg);
  return fd;
}

int columns_of(int fd) {
  winsize size{};
  if (!can_redraw(fd) || ::ioctl(fd, TIOCGWINSZ, &size) != 0) return 0;
  return size.ws_col > 0 ? size.ws_col : 80;
}

}  // namespace

int terminal_columns() { return columns_of(STDOUT_FILENO); }

Output::Destination::Destination(int descriptor, int failure_fd)
    : fd(descriptor), renderer(can_redraw(descriptor)), writer(kTerminalLimit, failure_fd) {}

Output::Output(const cli::RunOptions& options, std::vector<std::string> prefixes)
    : failures_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      only_rank_zero_(options.quiet_ranks),
      directory_(options.output_dir),
      ranks_(prefixes.size()) {
  for (std::size_t rank = 0; rank < prefixes.size(); ++rank) ranks_[rank].prefix = std::move(prefixes[rank]);
  if (!directory_.empty()) {
    std::error_code error;
    std::filesystem::create_directories(directory_, error);
    if (error)
      throw base::SystemError("--output: cannot create " + base::quoted(directory_, 256), error.value(),
                              base::Cause::kBadArg);
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      const std::string base = directory_ + "/rank." + std::to_string(rank);
      ranks_[rank].files[0] = create(base + ".out");
      ranks_[rank].files[1] = create(base + ".err");
    }
    disk_ = std::make_unique<BackgroundWriter>(kDiskLimit);
  }
  out_ = std::make_unique<Destination>(STDOUT_FILENO, failures_.get());
  if (!same_file(STDOUT_FILENO, STDERR_FILENO)) err_ = std::make_unique<Destination>(STDERR_FILENO, failures_.get());
}

void Output::keep_tail(RankOutput& output, const LineSegment& segment) {
  if (segment.end == SegmentEnd::kReturn || segment.end == SegmentEnd::kOpen) return;
  output.tail.push_back(segment.text.substr(0, kTailLineBytes));
  if (output.tail.size() > kTailLines) output.tail.pop_front();
}

void Output::print(int rank, Stream stream, const std::vector<LineSegment>& segments) {
  RankOutput& output = ranks_[static_cast<std::size_t>(rank)];
  Destination& to = destination(stream);
  std::string bytes;
  to.renderer.resize(columns_of(to.fd));
  for (const LineSegment& segment : segments) {
    if (stream == Stream::kErr) keep_tail(output, segment);
    if (rank == 0 || !only_rank_zero_)
      bytes += to.renderer.render(output.prefix, 2 * rank + static_cast<int>(stream), segment);
  }
  to.writer.write(to.fd, std::move(bytes), static_cast<int>(segments.size()));
}

void Output::add(int rank, Stream stream, std::string_view bytes) {
  if (rank < 0 || rank >= static_cast<int>(ranks_.size())) return;
  RankOutput& output = ranks_[static_cast<std::size_t>(rank)];
  const auto index = static_cast<std::size_t>(stream);
  if (disk_)
    disk_->write(output.files[index].get(), std::string(bytes),
                 static_cast<int>(std::count(bytes.begin(), bytes.end(), '\n')));
  std::vector<LineSegment> segments = output.splitters[index].feed(bytes);
  if (hides_interrupts_ && stream == Stream::kErr) segments = output.tracebacks.filter(std::move(segments));
  print(rank, stream, segments);
}

void Output::close_rank(int rank) {
  if (rank < 0 || rank >= static_cast<int>(ranks_.size())) return;
  RankOutput& output = ranks_[static_cast<std::size_t>(rank)];
  print(rank, Stream::kOut, output.splitters[0].finish());
  print(rank, Stream::kErr, output.tracebacks.filter(output.splitters[1].finish()));
  print(rank, Stream::kErr, output.tracebacks.finish());
}

bool Output::take_reader_closed() {
  std::uint64_t count = 0;
  [[maybe_unused]] const auto size = ::read(failures_.get(), &count, sizeof count);
  return out_->writer.error() == EPIPE;
}

void Output::print_note(std::string_view text) {
  Destination& to = destination(Stream::kErr);
  to.renderer.resize(columns_of(to.fd));
  to.writer.write(to.fd, to.renderer.render("lockstep: " + std::string(text) + "\n"), 1, true);
}

std::string Output::tail(int rank) const {
  std::string text;
  if (rank < 0 || rank >= static_cast<int>(ranks_.size())) return text;
  for (const std::string& line : ranks_[static_cast<std::size_t>(rank)].tail) text += prefix(rank) + line + "\n";
  return text;
}

bool Output::finish(const std::string& last) {
  for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) close_rank(rank);
  if (disk_) {
    const bool all = disk_->drain(1s, 10s);
    if (disk_->error() != 0)
      print_note("warning: --output: cannot write to " + base::quoted(directory_, 256) + ": " +
                 std::strerror(disk_->error()));
    else if (!all || disk_->dropped() > 0)
      print_note("warning: --output: the files in " + base::quoted(directory_, 256) +
                 " are incomplete, because the disk was too slow");
  }
  for (Destination* to : {out_.get(), err_.get()})
    if (to) to->writer.write(to->fd, to->renderer.close_bar(), 0, true);
  Destination& err = destination(Stream::kErr);
  // Write the output first, even if it goes to another file, so that `last` is the last line on the terminal.
  const bool is_whole = report_lost_output();
  err.writer.write(err.fd, last, 1, true);
  err.writer.drain(1s, 10s);
  return is_whole;
}

/// Waits until stdout is written. Prints a warning if lines were dropped or stdout could not be written. Returns
/// whether stdout has everything.
bool Output::report_lost_output() {
  out_->writer.drain(1s, 10s);
  const std::int64_t dropped = out_->writer.dropped() + (err_ ? err_->writer.dropped() : 0);
  if (dropped > 0)
    print_note("warning: " + std::to_string(dropped) + (dropped == 1 ? " line was" : " lines were") +
               " dropped: the terminal was too slow");
  const int error = out_->writer.error();
  if (error == 0 || error == EPIPE) return true;  // a reader that has closed wants no more
  if (err_)
    print_note("warning: cannot write to stdout: " + std::string(std::strerror(error)) + "; its end is missing");
  return false;
}

}  // namespace lockstep::launcher::output
