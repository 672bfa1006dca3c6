#include "lockstep/launch/agent/error_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "lockstep/base/parse.h"
#include "lockstep/job/job_key.h"
#include "lockstep/launch/protocol/rank_exit.h"

namespace lockstep::launcher::agent {
namespace {

constexpr std::size_t kMaxFileBytes = std::size_t{1} << 20;  // it also has the stack of the exception

}  // namespace

ErrorFiles::ErrorFiles() {
  const job::Mac random = job::random_nonce();
  std::error_code error;
  const std::filesystem::path folder = std::filesystem::temp_directory_path(error);
  prefix_ = (error ? "/tmp" : folder.string()) + "/lockstep-error-" +
            base::to_hex(job::mac_bytes(random).substr(0, 16)) + "-";
}

std::string ErrorFiles::path(int rank) const { return prefix_ + std::to_string(rank) + ".json"; }

std::string ErrorFiles::take_message(int rank) const {
  const std::string name = path(rank);
  const base::Fd fd(::open(name.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!fd) return "";
  ::unlink(name.c_str());
  struct stat info{};
  if (::fstat(fd.get(), &info) != 0 || !S_ISREG(info.st_mode)) return "";
  std::string text(kMaxFileBytes, '\0');
  std::size_t size = 0;
  while (size < text.size()) {
    const ssize_t got = ::read(fd.get(), text.data() + size, text.size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    size += static_cast<std::size_t>(got);
  }
  text.resize(size);
  return error_file_message(text);
}

std::string error_file_message(const std::string& text) {
  const auto json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object() || !json.contains("message")) return "";
  const nlohmann::json& outer = json["message"];
  const nlohmann::json& message = outer.is_object() && outer.contains("message") ? outer["message"] : outer;
  if (!message.is_string()) return "";
  return message.get<std::string>().substr(0, protocol::kMaxErrorMessageBytes);
}

}  // namespace lockstep::launcher::agent
