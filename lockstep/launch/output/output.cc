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
#include <utility>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"

namespace lockstep::launcher::output {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kTerminalLimit = std::size_t{8} << 20;
constexpr auto kStallLimit = 1s;
constexpr auto kReaderLimit = 2s;
constexpr auto kDrainLimit = 10s;
constexpr auto kInterruptInterval = 50ms;
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

bool is_regular_file(int fd) {
  struct stat info{};
  return ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
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
    : fd(descriptor),
      is_terminal(::isatty(descriptor) == 1),
      is_file(is_regular_file(descriptor)),
      renderer(can_redraw(descriptor)),
      writer(is_terminal ? kTerminalLimit : BackgroundWriter::kNoLimit, failure_fd) {}

Output::Output(const cli::RunOptions& options, std::vector<std::string> prefixes, std::size_t window)
    : failures_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      acks_(prefixes.size(), window),
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
    disk_ = std::make_unique<BackgroundWriter>(BackgroundWriter::kNoLimit, failures_.get());
  }
  destinations_.push_back(std::make_unique<Destination>(STDOUT_FILENO, failures_.get()));
  if (!same_file(STDOUT_FILENO, STDERR_FILENO))
    destinations_.push_back(std::make_unique<Destination>(STDERR_FILENO, failures_.get()));
}

void Output::print(int rank, Stream stream, const std::vector<LineSegment>& segments, std::shared_ptr<void> receipt) {
  RankOutput& output = ranks_[static_cast<std::size_t>(rank)];
  Destination& to = destination(stream);
  std::string bytes;
  to.renderer.resize(columns_of(to.fd));
  for (const LineSegment& segment : segments) {
    if (stream == Stream::kErr && segment.end != SegmentEnd::kReturn && segment.end != SegmentEnd::kOpen) {
      output.tail.push_back(segment.text.substr(0, kTailLineBytes));
      if (output.tail.size() > kTailLines) output.tail.pop_front();
    }
    if (rank == 0 || !only_rank_zero_)
      bytes += to.renderer.render(output.prefix, 2 * rank + static_cast<int>(stream), segment);
  }
  to.writer.write({.fd = to.fd,
                   .bytes = std::move(bytes),
                   .lines = static_cast<int>(segments.size()),
                   .receipt = to.is_terminal ? nullptr : std::move(receipt)});
}

void Output::add(int rank, Stream stream, std::string_view bytes) {
  if (rank < 0 || rank >= static_cast<int>(ranks_.size())) return;
  RankOutput& output = ranks_[static_cast<std::size_t>(rank)];
  const auto index = static_cast<std::size_t>(stream);
  const std::shared_ptr<void> receipt = acks_.receipt(rank, stream, bytes.size());
  if (disk_)
    disk_->write({.fd = output.files[index].get(),
                  .bytes = std::string(bytes),
                  .lines = static_cast<int>(std::ranges::count(bytes, '\n')),
                  .receipt = receipt});
  std::vector<LineSegment> segments = output.splitters[index].feed(bytes);
  if (hides_interrupts_ && stream == Stream::kErr) segments = output.tracebacks.filter(std::move(segments));
  print(rank, stream, segments, receipt);
}

void Output::close_rank(int rank) {
  if (rank < 0 || rank >= static_cast<int>(ranks_.size())) return;
  RankOutput& output = ranks_[static_cast<std::size_t>(rank)];
  print(rank, Stream::kOut, output.splitters[0].finish());
  print(rank, Stream::kErr, output.tracebacks.filter(output.splitters[1].finish()));
  print(rank, Stream::kErr, output.tracebacks.finish());
}

bool Output::check_failures() {
  std::uint64_t count = 0;
  [[maybe_unused]] const auto size = ::read(failures_.get(), &count, sizeof count);
  if (disk_ && disk_->error() != 0 && !std::exchange(has_warned_of_files_, true))
    print_note("warning: --output: cannot write to " + base::quoted(directory_, 256) + ": " +
               std::strerror(disk_->error()));
  const int error = destination(Stream::kOut).writer.error();
  if (error != 0 && error != EPIPE && destinations_.size() > 1 && !std::exchange(has_warned_of_stdout_, true))
    print_note("warning: cannot write to stdout: " + std::string(std::strerror(error)) + "; its end is missing");
  return error == EPIPE;
}

/// Returns whether the destination is stalled and has lost its queue.
bool Output::drop_if_stalled(Destination& to) {
  return may_drop_ && !to.is_file && to.writer.drop_if_stalled(kStallLimit);
}

void Output::print_note(std::string_view text) {
  Destination& to = destination(Stream::kErr);
  to.renderer.resize(columns_of(to.fd));
  to.writer.write(
      {.fd = to.fd, .bytes = to.renderer.render("lockstep: " + std::string(text) + "\n"), .lines = 1, .keep = true});
}

std::string Output::tail(int rank) const {
  std::string text;
  if (rank < 0 || rank >= static_cast<int>(ranks_.size())) return text;
  for (const std::string& line : ranks_[static_cast<std::size_t>(rank)].tail) text += prefix(rank) + line + "\n";
  return text;
}

std::vector<BackgroundWriter*> Output::writers() {
  std::vector<BackgroundWriter*> all;
  for (const auto& to : destinations_) all.push_back(&to->writer);
  if (disk_) all.push_back(disk_.get());
  return all;
}

/// Blocks until files and pipes have everything, or until the user interrupts it, which drops the rest. Returns false
/// in that case.
bool Output::wait_for_readers(const std::function<bool()>& is_interrupted) {
  std::vector<BackgroundWriter*> waited = writers();
  bool is_noted = destinations_.size() == 1;  // without a stderr of its own, the note would wait too
  for (;;) {
    std::erase_if(waited, [](BackgroundWriter* writer) { return writer->drain(0ms, 0ms); });
    if (waited.empty()) return true;
    if (is_interrupted()) break;
    for (const auto& to : destinations_)
      if (to->is_terminal || drop_if_stalled(*to)) std::erase(waited, &to->writer);
    if (waited.empty()) return true;
    if (!std::exchange(is_noted, true))
      print_note("waiting until the rest of the output has been read or written; Ctrl-C drops it");
    waited.front()->drain(kInterruptInterval, kInterruptInterval);
  }
  for (BackgroundWriter* writer : waited) writer->drop_if_stalled(0ms);
  return false;
}

std::int64_t Output::warn_about_dropped_lines(std::int64_t known) {
  std::int64_t dropped = 0;
  for (const auto& to : destinations_) dropped += to->writer.dropped();
  if (dropped > known)
    print_note("warning: " + std::to_string(dropped - known) + (dropped - known == 1 ? " line was" : " lines were") +
               " dropped: the reader of the output was too slow");
  if (disk_ && disk_->dropped() > 0)
    print_note("warning: --output: the files in " + base::quoted(directory_, 256) +
               " are incomplete, because the disk was too slow");
  return dropped;
}

bool Output::finish(const std::string& last, const std::function<bool()>& is_interrupted) {
  for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) close_rank(rank);
  for (const auto& to : destinations_)
    to->writer.write({.fd = to->fd, .bytes = to->renderer.close_bar(), .keep = true});
  // Write the output first, even if it goes to another file, so that `last` is the last line on the terminal. But a
  // reader that does not read must not hold up the cause.
  for (BackgroundWriter* writer : writers()) writer->drain(kStallLimit, kReaderLimit);
  for (const auto& to : destinations_)
    if (to->is_terminal) to->writer.drain(kStallLimit, kDrainLimit);
  check_failures();
  const std::int64_t dropped = warn_about_dropped_lines(0);
  Destination &out = destination(Stream::kOut), &err = destination(Stream::kErr);
  err.writer.write({.fd = err.fd, .bytes = last, .lines = 1, .keep = true});
  err.writer.drain(kStallLimit, kReaderLimit);
  bool is_whole = wait_for_readers(is_interrupted);
  warn_about_dropped_lines(dropped);
  check_failures();
  err.writer.drain(kStallLimit, kDrainLimit);
  is_whole = is_whole && (out.is_terminal || out.writer.dropped() == 0) && (!disk_ || disk_->error() == 0);
  return is_whole && (out.writer.error() == 0 || out.writer.error() == EPIPE);  // who closes a pipe wants no more
}

}  // namespace lockstep::launcher::output
