#include "lockstep/train/loggers/run_directory.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "lockstep/base/error.h"
#include "lockstep/train/loggers/record_file.h"

namespace lockstep::training::inline loggers {
namespace {

constexpr const char* kJobFile = "/job";  // file with the name of the job that used the directory last

std::string run_path(const RunDirectoryOptions& options, std::int64_t number) {
  return options.folder + "/" + options.name + (number == 1 ? "" : "-" + std::to_string(number));
}

/// Returns the highest number of a run of that name, 0 if there is none. The directory of run 1 has no number.
std::int64_t newest_run(const RunDirectoryOptions& options) {
  std::int64_t newest = 0;
  for (const auto& item : std::filesystem::directory_iterator(options.folder)) {
    const std::string entry = item.path().filename().string();
    if (entry == options.name) newest = std::max<std::int64_t>(newest, 1);
    if (!entry.starts_with(options.name + "-")) continue;
    const std::string digits = entry.substr(options.name.size() + 1);
    if (digits.empty() || digits.size() > 9 || digits.front() == '0' ||
        digits.find_first_not_of("0123456789") != std::string::npos)
      continue;
    newest = std::max<std::int64_t>(newest, std::stoll(digits));
  }
  return newest;
}

std::string read_job(const std::string& path) {
  std::ifstream file(path + kJobFile, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

RunDirectory open_run_directory(const RunDirectoryOptions& options) {
  create_parent_directories(options.folder + "/x");
  std::int64_t number = newest_run(options);
  RunDirectory run;
  if (options.generation > 0)
    for (std::int64_t i = number; i >= 1 && !run.is_resumed; --i)
      if (read_job(run_path(options, i)) == options.job) run = {run_path(options, i), true};
  if (!run.is_resumed && options.resume_newest && number > 0) run = {run_path(options, number), true};
  while (run.path.empty()) {
    const std::string path = run_path(options, ++number);
    if (::mkdir(path.c_str(), 0777) == 0)
      run.path = path;
    else if (errno != EEXIST)
      throw base::SystemError("cannot create the run directory " + path, errno);
  }
  if (read_job(run.path) != options.job) replace_file(run.path + kJobFile, options.job);
  return run;
}

std::string program_name() { return program_invocation_short_name; }

}  // namespace lockstep::training::inline loggers
