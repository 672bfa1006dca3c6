#include "lockstep/checkpoint/collective_save.h"

#include <sys/stat.h>
#include <sys/statvfs.h>

#include <cerrno>
#include <memory>
#include <nlohmann/json.hpp>
#include <system_error>

#include "lockstep/base/log.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/checkpoint/files/atomic_file.h"
#include "lockstep/checkpoint/files/folder_lock.h"
#include "lockstep/checkpoint/state_files.h"

namespace lockstep::checkpoint {
namespace {

using nlohmann::json;

// The kind of the error in an exchanged record.
enum ErrorKind { kNone, kUsageError, kSystemError, kOtherError };

json to_json(const std::exception_ptr& error) {
  if (!error) return {{"kind", kNone}};
  try {
    std::rethrow_exception(error);
  } catch (const base::UsageError& usage) {
    return {{"kind", kUsageError}, {"text", usage.what()}, {"hint", usage.hint()}, {"cause", name(usage.cause())}};
  } catch (const base::SystemError& system) {
    return {{"kind", kSystemError}, {"text", system.what()}, {"errno", system.error_number()}};
  } catch (const std::exception& other) {
    return {{"kind", kOtherError}, {"text", other.what()}};
  }
}

[[noreturn]] void throw_remote_error(const json& record, const std::string& what, int rank) {
  std::string text = what + ": rank " + std::to_string(rank) + ": " + record.at("text").get<std::string>();
  if (record.at("kind") == kUsageError)
    throw base::UsageError(text, record.at("hint").get<std::string>(),
                           base::cause_from_name(record.at("cause").get<std::string>()));
  if (record.at("kind") == kOtherError) throw base::Error(base::Cause::kCkptWriteFailed, text);
  // Removes the text of errno, because SystemError appends it again.
  const int number = record.at("errno").get<int>();
  const std::string tail = ": " + std::generic_category().message(number);
  if (text.ends_with(tail)) text.resize(text.size() - tail.size());
  throw base::SystemError(text, number, base::Cause::kCkptWriteFailed);
}

std::string dump(const json& object) { return object.dump(-1, ' ', false, json::error_handler_t::replace); }

// Collective: all ranks pass a record or an error, and get all records, or the first rank's error as an exception.
std::vector<json> all_gather_json(const comm::Group& group, const std::string& what, json mine,
                                  const std::exception_ptr& error) {
  mine.update(to_json(error));
  std::vector<json> all;
  for (const auto& text : group.all_gather_bytes(dump(mine), {.name = what})) all.push_back(json::parse(text));
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    if (all[rank].at("kind") != kNone) throw_remote_error(all[rank], what, static_cast<int>(rank));
  return all;
}

std::uint64_t check_parts(std::int64_t step, const CheckpointParts& mine) {
  if (step < 0) throw base::UsageError("step is " + std::to_string(step) + "; expected 0 or more");
  std::uint64_t num_bytes = 0;
  for (const auto& [name, state] : mine) {
    if (!is_part_name(name))
      throw base::UsageError("the part name is " + base::quoted(name, 80) +
                             "; expected 1 to 64 characters of a-z, A-Z, 0-9, _ and -");
    num_bytes += estimate_num_bytes(state);
  }
  return num_bytes;
}

void check_space(const std::string& folder, std::uint64_t num_bytes) {
  struct statvfs space{};
  if (::statvfs(folder.c_str(), &space) != 0) return;  // writing reports the error
  const auto free = static_cast<std::uint64_t>(space.f_bavail) * space.f_frsize;
  if (free < num_bytes + num_bytes / 10)
    throw base::SystemError("cannot write a checkpoint of " + std::to_string(num_bytes) + " bytes to " + folder +
                                ", which has " + std::to_string(free) + " bytes free",
                            ENOSPC, base::Cause::kCkptWriteFailed);
}

// The checkpoint's directory on rank 0 until it is published.
class CheckpointPublisher {
 public:
  CheckpointPublisher(const SaveRequest& request, std::uint64_t num_bytes)
      : request_(request), folder_(request.folder) {
    if (request.lock) request.lock->check();
    const auto names = list_checkpoints(request.folder);
    name_ = {names.empty() ? 1 : names.front().sequence + 1, request.step};
    check_space(request.folder, num_bytes);
  }

  const std::string& path() const { return folder_.path(); }

  std::string publish(const Manifest& manifest) {
    files::write_file(folder_.path() + "/" + kManifestName, to_text(manifest));
    if (request_.lock) request_.lock->check();  // once more: the files may have taken minutes to write
    folder_.commit(to_text(name_));
    // The checkpoint is durable: later errors do not change that.
    if (const auto error = capture_exception([&] { prune(); }))
      base::log_warning("the checkpoint " + folder_.path() + " is complete, but the cleanup after it failed: " +
                        to_json(error).at("text").get<std::string>());
    return folder_.path();
  }

 private:
  void prune() const {
    files::write_file(request_.folder + "/LATEST", to_text(name_) + "\n");
    // Damaged checkpoints are not counted. They are removed when they are older than the last checkpoint that is kept.
    int kept = 0;
    for (const CheckpointName& name : list_checkpoints(request_.folder)) {
      if (kept >= request_.keep)
        remove(name);
      else if (name == name_ || request_.verified->is_whole(request_.folder + "/" + to_text(name)))
        ++kept;
    }
  }

  void remove(const CheckpointName& name) const {
    files::remove_directory(request_.folder, to_text(name), kManifestName);
    request_.verified->forget(request_.folder + "/" + to_text(name));
  }

  const SaveRequest& request_;
  files::AtomicDirectory folder_;
  CheckpointName name_;
};

/// Appends what changes when the file is written or replaced.
void append_file_state(VerifiedCheckpoints::FileStates& state, const std::string& path) {
  struct stat file{};
  if (::stat(path.c_str(), &file) != 0) return state.push_back(-1);
  state.insert(state.end(), {static_cast<std::int64_t>(file.st_ino), file.st_size, file.st_mtim.tv_sec,
                             file.st_mtim.tv_nsec, file.st_ctim.tv_sec, file.st_ctim.tv_nsec});
}

}  // namespace

VerifiedCheckpoints::FileStates VerifiedCheckpoints::file_states(const SavedCheckpoint& checkpoint) {
  FileStates states;
  append_file_state(states, checkpoint.path() + "/" + kManifestName);
  for (const auto& file : checkpoint.manifest().files) append_file_state(states, checkpoint.path() + "/" + file.name);
  return states;
}

bool VerifiedCheckpoints::is_whole(const std::string& path) {
  try {
    const SavedCheckpoint checkpoint(path);
    FileStates states = file_states(checkpoint);
    if (const auto known = verified_.find(path); known != verified_.end() && known->second == states) return true;
    for (std::size_t i = 0; i < checkpoint.manifest().files.size(); ++i)
      if (!checkpoint.find_damage(i, /*verify_hashes=*/true).empty()) return false;
    add(checkpoint, std::move(states));
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

void throw_if_any_failed(const comm::Group& group, const std::string& what, const std::exception_ptr& error) {
  all_gather_json(group, what, json::object(), error);
}

SaveReport save_collective(const comm::Group& group, const SaveRequest& request, const CheckpointParts& mine) {
  const std::string what = "checkpoint of step " + std::to_string(request.step);
  const auto begin = std::chrono::steady_clock::now();
  std::uint64_t my_bytes = 0, num_bytes = 0;
  auto error = request.error ? request.error : capture_exception([&] { my_bytes = check_parts(request.step, mine); });
  for (const auto& record : all_gather_json(group, what, {{"bytes", my_bytes}}, error))
    num_bytes += record.at("bytes").get<std::uint64_t>();

  std::unique_ptr<CheckpointPublisher> publisher;
  if (group.rank() == 0)
    error = capture_exception([&] { publisher = std::make_unique<CheckpointPublisher>(request, num_bytes); });
  const auto temp = all_gather_json(group, what, {{"path", publisher ? publisher->path() : ""}}, error)[0]
                        .at("path")
                        .get<std::string>();

  json files = json::array();
  error = capture_exception([&] {
    for (const auto& [part, state] : mine)
      for (const auto& file : write_state(state, temp, part, group.rank()))
        files.push_back({file.name, file.num_bytes, file.hash, file.part});
  });
  const auto written = all_gather_json(group, what, {{"files", std::move(files)}}, error);

  Manifest manifest{.step = request.step, .world_size = group.size(), .version = LOCKSTEP_VERSION, .files = {}};
  for (std::size_t rank = 0; rank < written.size(); ++rank)
    for (const auto& file : written[rank].at("files"))
      manifest.files.push_back({.name = file.at(0).get<std::string>(),
                                .num_bytes = file.at(1).get<std::uint64_t>(),
                                .hash = file.at(2).get<std::string>(),
                                .part = file.at(3).get<std::string>(),
                                .rank = static_cast<int>(rank)});
  SaveReport report;
  for (const auto& file : manifest.files) report.num_bytes += file.num_bytes;
  if (publisher) error = capture_exception([&] { report.path = publisher->publish(manifest); });
  report.path = all_gather_json(group, what, {{"path", report.path}}, error)[0].at("path").get<std::string>();
  if (CheckpointName name; parse_checkpoint_name(report.path.substr(report.path.rfind('/') + 1), name))
    base::telemetry::RankPage::this_process().durable_checkpoint = name.sequence;
  report.duration = std::chrono::steady_clock::now() - begin;
  return report;
}

}  // namespace lockstep::checkpoint
