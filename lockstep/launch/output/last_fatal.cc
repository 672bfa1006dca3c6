#include "lockstep/launch/output/last_fatal.h"

#include <fcntl.h>
#include <unistd.h>

#include <filesystem>

#include "lockstep/base/fd.h"

namespace lockstep::launcher::output {
namespace {

constexpr std::size_t kMaxBytes = 64 << 10;

std::filesystem::path folder_in(const base::Env& env) {
  if (env.xdg_cache_home) return std::filesystem::path(*env.xdg_cache_home) / "lockstep";
  return env.home ? std::filesystem::path(*env.home) / ".cache" / "lockstep" : std::filesystem::path();
}

}  // namespace

void save_last_fatal(const std::string& line, const base::Env& env) noexcept {
  try {
    const std::filesystem::path folder = folder_in(env);
    std::error_code error;
    if (folder.empty() || (std::filesystem::create_directories(folder, error), error)) return;
    const base::Fd fd(
        ::open((folder / "last-fatal").c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600));
    const std::string text = line.substr(0, kMaxBytes - 1) + "\n";
    if (fd && ::write(fd.get(), text.data(), text.size()) < 0) return;
  } catch (const std::exception&) {
    // The line has been printed.
  }
}

std::optional<std::string> last_fatal(const base::Env& env) {
  const base::Fd fd(::open((folder_in(env) / "last-fatal").c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  std::string text(kMaxBytes, '\0');
  const ssize_t size = fd ? ::read(fd.get(), text.data(), text.size()) : -1;
  if (size <= 0) return std::nullopt;
  text.resize(static_cast<std::size_t>(size));
  return text.substr(0, text.find('\n'));
}

}  // namespace lockstep::launcher::output
