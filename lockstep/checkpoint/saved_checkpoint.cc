#include "lockstep/checkpoint/saved_checkpoint.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "lockstep/base/parse.h"
#include "lockstep/checkpoint/files/input_file.h"
#include "lockstep/checkpoint/files/limits.h"
#include "lockstep/checkpoint/state_files.h"

namespace lockstep::checkpoint {
namespace {

constexpr std::string_view kStepInfix = "-step-";
constexpr std::size_t kMinDigits = 8;  // names sort by number in a directory listing

std::string read_manifest(const std::string& path) {
  const files::InputFile file(path);
  if (file.num_bytes() > files::kMaxJsonBytes)
    file.throw_format_error(0, "a manifest of " + std::to_string(file.num_bytes()) + " bytes; expected at most 16 MiB");
  std::string text(file.num_bytes(), '\0');
  file.read(0, text.data(), text.size());
  return text;
}

}  // namespace

std::string to_text(const CheckpointName& name) {
  char digits[32];
  std::snprintf(digits, sizeof digits, "%0*lld", static_cast<int>(kMinDigits), static_cast<long long>(name.sequence));
  return digits + std::string(kStepInfix) + std::to_string(name.step);
}

bool parse_checkpoint_name(std::string_view text, CheckpointName& name) {
  const std::size_t at = text.find(kStepInfix);
  if (at == std::string_view::npos || at > 18) return false;
  const std::string_view digits = text.substr(std::min(text.find_first_not_of('0'), at), std::string_view::npos);
  const auto sequence = base::parse_int(digits.substr(0, digits.find(kStepInfix))),
             step = base::parse_int(text.substr(at + kStepInfix.size()));
  if (!sequence || !step) return false;
  name = {*sequence, *step};
  return to_text(name) == text;
}

std::vector<CheckpointName> list_checkpoints(const std::string& folder) {
  std::vector<CheckpointName> names;
  std::error_code error;
  std::filesystem::directory_iterator entry(folder, error), end;
  for (; !error && entry != end; entry.increment(error)) {
    CheckpointName name;
    if (parse_checkpoint_name(entry->path().filename().string(), name)) names.push_back(name);
  }
  if (error && error != std::errc::no_such_file_or_directory)
    throw base::SystemError("cannot read the directory " + folder, error.value());
  std::sort(names.rbegin(), names.rend());
  return names;
}

SavedCheckpoint::SavedCheckpoint(std::string path) : path_(std::move(path)) {
  const std::string file = path_ + "/" + kManifestName;
  manifest_ = parse_manifest(read_manifest(file), file);
}

std::set<std::string> SavedCheckpoint::part_names(int rank) const {
  std::set<std::string> names;
  for (const auto& file : manifest_.files)
    if (file.rank == rank) names.insert(file.part);
  return names;
}

StateDict SavedCheckpoint::read(const std::string& part, int rank) const {
  std::vector<Manifest::File> files;
  for (const auto& file : manifest_.files)
    if (file.rank == rank && file.part == part) files.push_back(file);
  if (!files.empty()) return read_state(path_, files);
  const std::string names = base::joined(part_names(rank));
  throw base::UsageError("the checkpoint " + path_ + " has no part " + base::quoted(part, 80) + " of rank " +
                         std::to_string(rank) + "; expected " +
                         (names.empty() ? "another rank, since this one has no parts" : "one of " + names));
}

std::string SavedCheckpoint::find_damage(std::size_t number, bool verify_hashes) const {
  const Manifest::File& file = manifest_.files[number];
  try {
    const files::InputFile opened(path_ + "/" + file.name);
    if (opened.num_bytes() != file.num_bytes)
      return opened.path() + " has " + std::to_string(opened.num_bytes()) + " bytes; expected " +
             std::to_string(file.num_bytes);
    if (verify_hashes) verify_file(path_, file);
    return "";
  } catch (const base::Error& error) {
    return error.what();
  }
}

}  // namespace lockstep::checkpoint
