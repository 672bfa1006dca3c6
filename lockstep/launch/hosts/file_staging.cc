#include "lockstep/launch/hosts/file_staging.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "lockstep/base/content_hash.h"
#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "lockstep/base/log.h"
#include "lockstep/base/parse.h"
#include "lockstep/launch/hosts/start_agents.h"
#include "lockstep/launch/process/program.h"
#include "lockstep/launch/process/python_program.h"
#include "lockstep/launch/process/tools.h"

namespace lockstep::launcher::hosts {
namespace {

constexpr std::size_t kMaxFileBytes = std::size_t{1} << 30;
constexpr std::size_t kMaxFolderBytes = std::size_t{256} << 20, kMaxFolderEntries = 100000;
constexpr const char* kFolderName = "files";  // beside its archive

bool is_plain(const std::string& name) {
  return !name.empty() && name.size() <= 100 && name[0] != '.' && name[0] != '-' && base::is_alnum_or(name, "_-.");
}

/// Lists what to pack of a folder, before anything is read.
class FolderList {
 public:
  explicit FolderList(const std::string& folder) : folder_(folder) { add(".", folder_); }

  /// Returns the paths from the folder on, each followed by a zero byte.
  const std::string& paths() const { return paths_; }

 private:
  void add(const std::string& path, const std::filesystem::path& at) {
    struct stat info{};
    if (::stat(at.c_str(), &info) != 0) return leave_out(path, std::strerror(errno));
    if (S_ISDIR(info.st_mode)) return add_folder(path, at, {info.st_dev, info.st_ino});
    if (!S_ISREG(info.st_mode)) return;
    if (::access(at.c_str(), R_OK) != 0) return leave_out(path, std::strerror(errno));
    bytes_ += static_cast<std::uintmax_t>(info.st_size);
    record(path);
  }

  void add_folder(const std::string& path, const std::filesystem::path& at, std::pair<dev_t, ino_t> identity) {
    if (std::ranges::find(above_, identity) != above_.end())
      return leave_out(path, "a link to a folder that contains it");
    std::error_code error;
    std::vector<std::string> names;
    for (std::filesystem::directory_iterator entry(at, error), end; !error && entry != end; entry.increment(error))
      names.push_back(entry->path().filename().string());
    if (error) return leave_out(path, error.message());
    record(path);
    std::ranges::sort(names);
    above_.push_back(identity);
    for (const std::string& name : names)
      if (name[0] != '.' && name != "__pycache__" && name != "runs") add(path + "/" + name, at / name);
    above_.pop_back();
  }

  void record(const std::string& path) {
    paths_ += path + '\0';
    if (bytes_ > kMaxFolderBytes || ++entries_ > kMaxFolderEntries)
      throw base::UsageError("--ship: the folder of the script, " + base::quoted(folder_.string(), 256) +
                                 ", has more than " + std::to_string(kMaxFolderBytes >> 20) + " MiB, or more than " +
                                 std::to_string(kMaxFolderEntries) + " files",
                             "put the script and what it imports in a folder of their own, without data");
  }

  static void leave_out(const std::string& path, const std::string& why) {
    base::log_warning("--ship leaves out " + base::escaped(path, 256) + ": " + why);
  }

  const std::filesystem::path folder_;
  std::string paths_;
  std::uintmax_t bytes_ = 0;
  std::size_t entries_ = 0;
  std::vector<std::pair<dev_t, ino_t>> above_;  // the folders that are being listed
};

/// A file that is removed at the end.
class TemporaryFile {
 public:
  TemporaryFile() {
    std::error_code error;
    const std::filesystem::path folder = std::filesystem::temp_directory_path(error);  // TMPDIR, if it exists
    path_ = ((error ? "/tmp" : folder) / "lockstep-ship-XXXXXX").string();
    const base::Fd fd(::mkostemp(path_.data(), O_CLOEXEC));
    if (!fd)
      throw base::Error(base::Cause::kResource,
                        "--ship: cannot create " + base::quoted(path_, 256) + ": " + std::strerror(errno),
                        "set TMPDIR to a folder that this user can write to");
  }
  ~TemporaryFile() { ::unlink(path_.c_str()); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace

StagedFile read_staged_folder(const std::string& path, const std::string& inside) {
  const FolderList list(path);
  const TemporaryFile archive;
  process::Environment environment = process::current_environment();
  std::erase_if(environment, [](const std::string& variable) { return variable.starts_with("TAR_OPTIONS="); });
  const process::ToolResult result =
      process::run_tool({.path = process::find_tool("tar", environment),
                         .argv = {"tar", "--create", "--file=" + archive.path(), "--directory=" + path, "--dereference",
                                  "--hard-dereference", "--mtime=@0", "--owner=0", "--group=0", "--numeric-owner",
                                  "--ignore-failed-read", "--transform=s,^\\.," + inside + ",", "--no-recursion",
                                  "--null", "--verbatim-files-from", "--files-from=-"},
                         .environment = environment,
                         .limit = std::chrono::seconds(60),
                         .input = list.paths()});
  constexpr int kFilesChanged = 1;  // such as a log, while tar read it
  if (!result.path.empty() && result.code == kFilesChanged)
    base::log_warning("--ship: " + base::escaped(result.message(), 256));
  else if (!result.succeeded())
    throw base::UsageError("--ship: tar cannot pack " + base::quoted(path, 256) + ": " +
                           (result.path.empty()                             ? "it is not installed"
                            : result.code == process::ToolResult::kTimedOut ? "it did not end within 60 s"
                                                                            : base::quoted(result.message(), 256)));
  StagedFile file = read_staged_file(archive.path());
  if (file.content.empty()) throw base::UsageError("--ship: tar cannot pack " + base::quoted(path, 256));
  file.name = "files.tar";
  file.is_folder = true;
  return file;
}

StagedFiles files_to_stage(const cli::RunOptions& options) {
  if (!options.ship || std::ranges::all_of(options.hosts, is_local_host) || options.hosts.front().is_pod)
    return nullptr;
  std::vector<StagedFile> files = {read_staged_file(process::executable_path())};
  const auto add = [&](StagedFile file, const char* option) {
    file.option = option;
    files.push_back(std::move(file));
  };
  const auto path_of = [&](const std::string& word) {
    return word[0] == '/' || options.directory.empty() ? word : options.directory + "/" + word;
  };
  if (const std::string hook = process::python_hook_folder(); !hook.empty()) {
    try {
      add(read_staged_folder(hook, process::kPythonHook), "--staged-hook");
      files.back().is_optional = true;
    } catch (const base::UsageError&) {
      // Without tar, Python programs on other hosts are not watched.
    }
  }
  const std::string& program = options.command.front();
  if (const auto script = process::python_script_index(options.command)) {
    const std::string path = path_of(options.command[*script]);
    if (!std::filesystem::is_regular_file(path))
      throw base::UsageError("--ship: " + base::quoted(path, 256) + " is not a file");
    add(read_staged_folder(std::filesystem::absolute(path).parent_path().string()), "--staged-script");
  } else if (program.find('/') != std::string::npos && !process::is_python(program)) {
    add(read_staged_file(path_of(program)), "--staged-program");
  }
  return std::make_shared<const std::vector<StagedFile>>(std::move(files));
}

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
  // that is there already may be damaged, so its checksum is compared. What was unpacked from an archive stays:
  // others may use it. A file of it that was changed since is renamed, and unpacked again.
  std::string script =
      "m=$(umask); umask 077; c=${XDG_CACHE_HOME:-$HOME/.cache}/lockstep; is() { [ \"$(cksum <\"$1\")\" = \"$2 $3\" ]; "
      "}; put() { f=$c/$1/$2; if [ -x \"$f\" ] && is \"$f\" $4 $3; then echo y; return; fi; mkdir -p \"$c/$1\" && "
      "t=$(mktemp \"$c/$1/.XXXXXX\") && echo n && head -c $3 >\"$t\" && is \"$t\" $4 $3 && chmod 700 \"$t\" && mv -f "
      "\"$t\" \"$f\" || { rm -f \"$t\"; exit 125; }; }; sums() { LC_ALL=C tar --quoting-style=literal -tf \"$1\" | "
      "grep -v \"/\\$\" | tr \"\\n\" \"\\0\" | (cd \"$2\" && LC_ALL=C xargs -0 cksum) 2>/dev/null; }; repair() { sums "
      "\"$1\" \"$2\" >\"$3.$$\"; if ! cmp -s \"$3\" \"$3.$$\"; then grep -Fxv -f \"$3\" \"$3.$$\" | cut -d\" \" -f3- | "
      "while IFS= read -r f; do mv -f \"$2/$f\" \"$2/$f.changed\"; done; tar -xf \"$1\" -C \"$2\" && sums \"$1\" "
      "\"$2\" >\"$3\"; fi; rm -f \"$3.$$\"; }; unpack() { a=$c/$1/$2; s=$c/$1/files.sums; d=$c/$1/" +
      std::string(kFolderName) +
      "; if [ -d \"$d\" ]; then [ $3 = 1 ] || repair \"$a\" \"$d\" \"$s\"; return; fi; t=$(mktemp -d "
      "\"$c/$1/.XXXXXX\") && tar -xf \"$a\" -C \"$t\" && sums \"$a\" \"$t\" >\"$t.s\" && mv -f \"$t.s\" \"$s\" && mv "
      "-T \"$t\" \"$d\" 2>/dev/null; rm -rf \"$t\"; [ -d \"$d\" ]; }; ";
  for (const StagedFile& file : files) {
    script += "put " + file.hash + " " + file.name + " " + std::to_string(file.content.size()) + " " +
              std::to_string(posix_checksum(file.content)) + "; ";
    if (file.is_folder)
      script += "unpack " + file.hash + " " + file.name + (file.is_in_use ? " 1" : " 0") +
                (file.is_optional ? "; " : " || exit 125; ");
  }
  script += "umask $m; exec \"$c/" + files.front().hash + "/" + files.front().name + "\"";
  for (const std::string& word : agent_arguments) script += " " + word;
  for (const StagedFile& file : files)
    if (!file.option.empty())
      script += " " + file.option + " \"$c/" + file.hash + "/" + (file.is_folder ? kFolderName : file.name) + "\"";
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
