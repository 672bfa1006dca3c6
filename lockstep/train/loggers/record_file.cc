#include "lockstep/train/loggers/record_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <utility>

#include "lockstep/base/error.h"

namespace lockstep::training::inline loggers {
namespace {

constexpr std::size_t kMaxBufferedBytes = std::size_t{64} << 10;

/// Writes `bytes` and returns how many were written; errno has the reason if not all.
std::size_t write_some(int fd, std::string_view bytes) {
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t written = ::write(fd, bytes.data() + done, bytes.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) break;
    done += static_cast<std::size_t>(written);
  }
  return done;
}

/// A temporary file next to `path` that commit() renames to it.
class ReplacementFile {
 public:
  explicit ReplacementFile(const std::string& path)
      : path_(path), temporary_(path + ".new." + std::to_string(::getpid())) {
    create_parent_directories(path);
    file_.reset(::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0666));
    if (!file_) fail();
  }
  ~ReplacementFile() {
    if (!temporary_.empty()) ::unlink(temporary_.c_str());
  }
  ReplacementFile(const ReplacementFile&) = delete;
  ReplacementFile& operator=(const ReplacementFile&) = delete;

  void write(std::string_view bytes) {
    if (write_some(file_.get(), bytes) < bytes.size()) fail();
  }
  void commit() {
    if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail();
    temporary_.clear();
  }

 private:
  [[noreturn]] void fail() const { throw base::SystemError("cannot write " + path_, errno); }

  std::string path_;
  std::string temporary_;
  base::Fd file_;
};

}  // namespace

void create_parent_directories(const std::string& path) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  if (folder.empty()) return;
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw base::SystemError("cannot create the directory " + folder.string(), error.value());
}

void RecordFile::open() {
  create_parent_directories(path_);
  file_.reset(::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
  if (!file_) throw base::SystemError("cannot write " + path_, errno);
}

void RecordFile::append(std::string_view record) {
  buffer_ += record;
  ++num_buffered_;
  if (buffer_.size() >= kMaxBufferedBytes) flush();
}

void RecordFile::flush() {
  if (buffer_.empty()) return;
  const std::string bytes = std::exchange(buffer_, {});
  const std::int64_t records = std::exchange(num_buffered_, 0);
  if (!file_) open();
  struct stat before{};
  const bool known = ::fstat(file_.get(), &before) == 0;
  if (known && write_some(file_.get(), bytes) == bytes.size()) return;
  const int error = errno;
  // Removes a partial record, after which later ones could not be read. If even that fails, the same error reports it.
  if (known && ::ftruncate(file_.get(), before.st_size) != 0) file_.reset();
  throw base::SystemError("cannot write " + std::to_string(records) + " records to " + path_, error);
}

void replace_file(const std::string& path, std::string_view bytes) {
  ReplacementFile file(path);
  file.write(bytes);
  file.commit();
}

void rewrite_lines(const std::string& path, const std::function<void(std::string& line)>& change) {
  create_parent_directories(path);
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> old(std::fopen(path.c_str(), "rbe"), &std::fclose);
  if (!old && errno != ENOENT) throw base::SystemError("cannot read " + path, errno);
  ReplacementFile file(path);
  std::string line, ready;
  char* text = nullptr;
  std::size_t capacity = 0;
  for (ssize_t size = 0; old && (size = ::getline(&text, &capacity, old.get())) > 0 && text[size - 1] == '\n';) {
    line.assign(text, static_cast<std::size_t>(size));
    change(line);
    ready += line;
    if (ready.size() >= kMaxBufferedBytes) file.write(std::exchange(ready, {}));
  }
  std::free(text);
  if (old && std::ferror(old.get()) != 0) throw base::SystemError("cannot read " + path, errno);
  line.clear();
  change(line);
  file.write(ready + line);
  file.commit();
}

}  // namespace lockstep::training::inline loggers
