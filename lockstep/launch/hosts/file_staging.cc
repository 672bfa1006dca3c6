#include "lockstep/launch/hosts/file_staging.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <cstring>

#include "lockstep/base/content_hash.h"
#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "lockstep/base/parse.h"

namespace lockstep::launcher::hosts {
namespace {

constexpr std::size_t kMaxFileBytes = std::size_t{1} << 30;

bool is_plain(const std::string& name) {
  return !name.empty() && name.size() <= 100 && name[0] != '.' && name[0] != '-' &&
         std::all_of(name.begin(), name.end(),
                     [](unsigned char c) { return std::isalnum(c) || c == '_' || c == '-' || c == '.'; });
}

}  // namespace

std::uint32_t posix_checksum(std::string_view bytes) {
  static const auto table = [] {
    std::array<std::uint32_t, 256> all{};
    for (std::uint32_t i = 0; i < all.size(); ++i) {
      all[i] = i << 24;
      for (int bit = 0; bit < 8; ++bit) all[i] = all[i] << 1 ^ ((all[i] & 0x80000000u) != 0 ? 0x04c11db7u : 0);
    }
    return all;
  }();
  std::uint32_t crc = 0;
  const auto add = [&](unsigned char byte) { crc = crc << 8 ^ table[(crc >> 24 ^ byte) & 0xff]; };
  for (const char byte : bytes) add(static_cast<unsigned char>(byte));
  for (std::size_t size = bytes.size(); size > 0; size >>= 8) add(static_cast<unsigned char>(size & 0xff));
  return ~crc;
}

StagedFile read_staged_file(const std::string& path) {
  const auto refuse = [&](const std::string& why) {
    throw base::UsageError("--ship: " + base::quoted(path, 256) + ": " + why);
  };
  const base::Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat info{};
  if (!fd || ::fstat(fd.get(), &info) != 0) refuse(std::strerror(errno));
  if (!S_ISREG(info.st_mode)) refuse("not a regular file");
  const auto size = static_cast<std::size_t>(info.st_size);
  if (size > kMaxFileBytes) refuse(std::to_string(size) + " bytes; expected at most " + std::to_string(kMaxFileBytes));
  StagedFile file;
  file.content.resize(size);
  for (std::size_t have = 0; have < size;) {
    const ssize_t got = ::read(fd.get(), file.content.data() + have, size - have);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) refuse(got < 0 ? std::strerror(errno) : "the file shrank while it was read");
    have += static_cast<std::size_t>(got);
  }
  const std::string name = path.substr(path.rfind('/') + 1);
  file.name = is_plain(name) ? name : "program";
  base::ContentHash hash;
  hash.add(file.content);
  file.hash = hash.hex_digest();
  return file;
}

std::string staging_script(const std::vector<StagedFile>& files, const std::vector<std::string>& agent_arguments) {
  // Concurrent copies write to temporary files of their own; whichever is renamed last has the same content. A file
  // that is there already may be damaged, so its checksum is compared.
  std::string script =
      "m=$(umask); umask 077; c=${XDG_CACHE_HOME:-$HOME/.cache}/lockstep; "
      "is() { [ \"$(cksum <\"$1\")\" = \"$2 $3\" ]; }; "
      "put() { f=$c/$1/$2; if [ -x \"$f\" ] && is \"$f\" $4 $3; then echo y; return; fi; "
      "mkdir -p \"$c/$1\" && t=$(mktemp \"$c/$1/.XXXXXX\") && echo n && head -c $3 >\"$t\" && is \"$t\" $4 $3 && "
      "chmod 700 \"$t\" && mv -f \"$t\" \"$f\" || { rm -f \"$t\"; exit 125; }; }; ";
  for (const StagedFile& one : files)
    script += "put " + one.hash + " " + one.name + " " + std::to_string(one.content.size()) + " " +
              std::to_string(posix_checksum(one.content)) + "; ";
  script += "umask $m; exec \"$c/" + files.front().hash + "/" + files.front().name + "\"";
  for (const std::string& word : agent_arguments) script += " " + word;
  if (files.size() > 1) script += " --staged-program \"$c/" + files[1].hash + "/" + files[1].name + "\"";
  return script;
}

void FileStaging::consume(std::string& bytes) {
  while (next_ < files_->size() && bytes.size() >= 2) {
    if ((bytes[0] != 'y' && bytes[0] != 'n') || bytes[1] != '\n' || !pending_bytes().empty())
      throw base::Error(base::Cause::kProtocol,
                        "the staging script printed " + base::quoted(bytes, 80) + "; expected y or n");
    sending_ = bytes[0] == 'n';
    sent_ = 0;
    ++next_;
    bytes.erase(0, 2);
  }
}

std::string_view FileStaging::pending_bytes() const {
  return sending_ ? std::string_view((*files_)[next_ - 1].content).substr(sent_) : std::string_view();
}

}  // namespace lockstep::launcher::hosts
