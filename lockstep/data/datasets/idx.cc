#include "lockstep/data/datasets/idx.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <memory>

#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"

namespace lockstep::data::inline datasets {
namespace {

constexpr std::uint64_t kMaxBytes = std::uint64_t{2} << 30;  // MNIST's largest file has 47 MB
constexpr std::uint64_t kMaxRatio = 1032;                    // of deflate: 258 bytes from 2 bits (zlib's documentation)
constexpr unsigned kUnsignedByte = 0x08;
constexpr unsigned kMaxDimensions = 4;

struct GzCloser {
  void operator()(gzFile_s* file) const { ::gzclose_r(file); }
};

// Reads a plain or compressed file through zlib and tracks the offset in the decompressed data.
class GzReader {
 public:
  explicit GzReader(const std::string& path) : path_(path) {
    base::Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    struct stat status{};
    if (!fd || ::fstat(fd.get(), &status) != 0) throw base::SystemError("cannot read " + path, errno);
    if (!S_ISREG(status.st_mode)) throw base::UsageError(path + " is not a regular file");
    size_ = static_cast<std::uint64_t>(status.st_size);
    file_.reset(::gzdopen(fd.get(), "rb"));
    if (!file_) throw base::SystemError("cannot read " + path, ENOMEM);
    fd.release();
    // gzdirect() reads the first bytes; it returns 0 if they are gzip's magic number.
    compressed_ = ::gzdirect(file_.get()) == 0;
  }

  [[noreturn]] void throw_format_error(std::uint64_t offset, const std::string& reason) const {
    throw base::FormatError(path_ + ":" + std::to_string(offset) + ": " + reason);
  }

  // Returns fewer bytes than `size` only at the end of the file.
  std::size_t read(std::uint8_t* data, std::size_t size) {
    std::size_t done = 0;
    while (done < size) {
      const int got =
          ::gzread(file_.get(), data + done, static_cast<unsigned>(std::min<std::size_t>(size - done, 1 << 20)));
      if (got < 0) throw_read_error();
      if (got == 0) break;
      done += static_cast<std::size_t>(got);
      offset_ += static_cast<std::uint64_t>(got);
    }
    // gzread() reports a truncated stream as the end of the file; the error is only in gzerror().
    int error = Z_OK;
    ::gzerror(file_.get(), &error);
    if (done < size && error != Z_OK && error != Z_STREAM_END) throw_read_error();
    return done;
  }

  void read_all(std::uint8_t* data, std::size_t size, const char* what) {
    const std::uint64_t begin = offset_;
    const std::size_t got = read(data, size);
    if (got != size)
      throw_format_error(offset_, "the file ends inside " + std::string(what) + ": got " + std::to_string(got) +
                                      " bytes from offset " + std::to_string(begin) + ", expected " +
                                      std::to_string(size));
  }

  // Returns an upper bound of the decompressed size, so that nothing larger is allocated.
  std::uint64_t max_bytes() const { return compressed_ ? size_ * kMaxRatio : size_; }
  std::uint64_t offset() const { return offset_; }

 private:
  [[noreturn]] void throw_read_error() const {
    int error = Z_OK;
    const std::string text = ::gzerror(file_.get(), &error);
    if (error == Z_ERRNO) throw base::SystemError("cannot read " + path_, errno);
    throw_format_error(offset_,
                       "damaged gzip data (" + (text.empty() ? "zlib error " + std::to_string(error) : text) + ")");
  }

  std::string path_;
  std::unique_ptr<gzFile_s, GzCloser> file_;
  std::uint64_t size_ = 0;
  std::uint64_t offset_ = 0;
  bool compressed_ = false;
};

std::uint64_t read_shape(GzReader& in, std::vector<std::int64_t>& shape) {
  std::array<std::uint8_t, 4> word{};
  in.read_all(word.data(), word.size(), "the magic number");
  if (word[0] != 0 || word[1] != 0) in.throw_format_error(0, "not an IDX file; expected two zero bytes");
  if (word[2] != kUnsignedByte)
    in.throw_format_error(2, "IDX type is " + std::to_string(word[2]) + "; expected 8 (unsigned byte)");
  const unsigned num_dimensions = word[3];
  if (num_dimensions < 1 || num_dimensions > kMaxDimensions)
    in.throw_format_error(3, "the file has " + std::to_string(num_dimensions) + " dimensions; expected 1 to 4");
  std::uint64_t num_bytes = 1;
  for (unsigned i = 0; i < num_dimensions; ++i) {
    in.read_all(word.data(), word.size(), "the list of dimensions");
    const std::uint32_t extent = static_cast<std::uint32_t>(word[0]) << 24 | word[1] << 16 | word[2] << 8 | word[3];
    shape.push_back(extent);
    if (__builtin_mul_overflow(num_bytes, std::uint64_t{extent}, &num_bytes) || num_bytes > kMaxBytes)
      in.throw_format_error(in.offset() - 4, "dimension " + std::to_string(i) + " is " + std::to_string(extent) +
                                                 ", which exceeds the limit of 2 GiB for all values");
  }
  return num_bytes;
}

}  // namespace

IdxArray read_idx(const std::string& path) {
  GzReader in(path);
  IdxArray idx;
  const std::uint64_t num_bytes = read_shape(in, idx.shape);
  idx.values_offset = in.offset();
  if (idx.values_offset + num_bytes > in.max_bytes())
    in.throw_format_error(idx.values_offset,
                          "the header declares " + std::to_string(num_bytes) + " values, but the file holds at most " +
                              std::to_string(in.max_bytes() - std::min(in.max_bytes(), idx.values_offset)));
  idx.values.resize(num_bytes);
  in.read_all(idx.values.data(), idx.values.size(), "the values");
  std::uint8_t extra = 0;
  if (in.read(&extra, 1) != 0)
    in.throw_format_error(in.offset() - 1, "the file continues after the " + std::to_string(num_bytes) +
                                               " values that its header declares");
  return idx;
}

}  // namespace lockstep::data::inline datasets
