#include "lockstep/train/training_state.h"

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/checkpoint/collective_save.h"
#include "lockstep/comm/group_access.h"
#include "lockstep/ddp/ddp.h"
#include "lockstep/ddp/outer/host_averager.h"
#include "lockstep/optim/fused/fused_optimizer.h"
#include "lockstep/train/loggers/text_format.h"

namespace lockstep::training {
namespace {

using base::UsageError;
using checkpoint::StateDict;
using checkpoint::value_of;

// The version that TrainingState writes.
constexpr std::int64_t kFormatVersion = 1;

// The part with the format version, the `finished` flag and the settings, and the names of its values.
constexpr const char* kTrainingPart = "training";
constexpr const char* kVersionKey = "format_version";
constexpr const char* kFinishedKey = "finished";
constexpr const char* kSettingPrefix = "setting.";        // of TrainingStateOptions.settings, followed by the name
constexpr const char* kAddedSettingPrefix = "compared.";  // of add_setting()
constexpr const char* kHostsKey = "hosts";                // the first rank of each, if hosts differ

constexpr const char* kValuesPart = "values";
constexpr const char* kRandomPart = "random";
constexpr const char* kLayoutKey = "layout";
constexpr const char* kPythonSuffix = "-python";  // of parts that only the Python package has, and that are ignored
constexpr std::size_t kMaxNameLength = 60;

std::string text_of(const checkpoint::StateValue& value) {
  if (const auto* const it = std::get_if<bool>(&value)) return *it ? "true" : "false";
  if (const auto* const it = std::get_if<std::int64_t>(&value)) return std::to_string(*it);
  if (const auto* const it = std::get_if<double>(&value)) {
    std::string number;
    append_number(number, *it);
    return number.find_first_not_of("-0123456789") == std::string::npos ? number + ".0" : number;
  }
  if (const auto* const it = std::get_if<std::string>(&value)) return "\"" + *it + "\"";
  return "a tensor";
}

/// Throws UsageError for a checkpoint of another origin, and for a version above kFormatVersion.
void check_format(const checkpoint::SavedCheckpoint& saved) {
  if (!saved.part_names().contains(kTrainingPart))
    throw UsageError("resume: the checkpoint " + saved.path() +
                         " was not written by a TrainingState or a Trainer; expected one that was",
                     "read it with checkpoint::Checkpointer", base::Cause::kBadFile);
  const auto version = value_of<std::int64_t>(saved.read(kTrainingPart), kVersionKey);
  if (version > kFormatVersion)
    throw UsageError(
        "resume: the checkpoint " + saved.path() + " has format version " + std::to_string(version) +
            "; expected at most " + std::to_string(kFormatVersion),
        "resume with the version of Lockstep that wrote it, " + saved.manifest().version + ", or a newer one",
        base::Cause::kBadFile);
}

/// Returns the directory of checkpoints that `path` is or contains; "" if there is none.
std::string find_checkpoints_directory(const std::string& path) {
  const std::string inner = path + "/checkpoints";
  if (std::filesystem::is_directory(inner)) return inner;
  return checkpoint::list_checkpoints(path).empty() ? "" : path;
}

/// Removes the trailing / of a path such as "runs/mnist/checkpoints/00000007-step-120/".
std::string strip_trailing_slashes(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  return path;
}

/// Loads the checkpoint that `path` is, or the latest one that it contains. Rank 0 looks at the path.
checkpoint::SavedCheckpoint load_from(comm::Group& world, const std::string& path) {
  std::string folder;  // "": `path` is a checkpoint
  std::exception_ptr error;
  if (world.rank() == 0)
    error = checkpoint::capture_exception([&] {
      checkpoint::CheckpointName name;
      const bool is_checkpoint =
          checkpoint::parse_checkpoint_name(std::filesystem::path(path).filename().string(), name) &&
          std::filesystem::is_directory(path);
      if (!is_checkpoint) folder = find_checkpoints_directory(path);
      if (!is_checkpoint && folder.empty())
        throw UsageError("resume: \"" + path +
                             "\" contains no checkpoint; expected the path of a checkpoint or of a run's directory",
                         "", base::Cause::kBadFile);
    });
  checkpoint::throw_if_any_failed(world, "find the checkpoint to resume from", error);
  folder = world.broadcast_bytes(folder, 0, {.name = "resume path"});
  const bool is_checkpoint = folder.empty();
  if (is_checkpoint) folder = std::filesystem::absolute(path).parent_path().string();
  return checkpoint::Checkpointer(world, folder).load(is_checkpoint ? path : "auto");
}

/// Under `lockstep plan`, a program neither resumes from its own checkpoints nor changes them.
std::string used_folder(const std::string& folder) {
  const auto profile = base::profile_request();
  if (!profile) return folder;
  std::string name = folder;
  std::replace(name.begin(), name.end(), '/', '_');
  return profile->folder + "/checkpoints/" + name;
}

/// `names`: the module whose names the parameters have, or the parameters with their names.
template <typename Names>
StateMember optimizer_member(torch::optim::Optimizer& optimizer, Names names) {
  return {.state_dict = [&optimizer, names] { return checkpoint::optimizer_state_dict(optimizer, names); },
          .load_state_dict =
              [&optimizer, names](const StateDict& state) {
                checkpoint::load_optimizer_state_dict(optimizer, names, state);
              }};
}

}  // namespace

StateMember member_of(checkpoint::Stateful& object) {
  return {.state_dict = [&object] { return object.state_dict(); },
          .load_state_dict = [&object](const StateDict& state) { object.load_state_dict(state); }};
}

TrainingState::TrainingState(comm::Group world, const std::string& folder, TrainingStateOptions options)
    : world_(std::move(world)), options_(std::move(options)) {
  for (const auto& [name, value] : options_.settings)
    if (std::holds_alternative<at::Tensor>(value))
      throw UsageError("TrainingStateOptions.settings: \"" + name +
                       "\" is a tensor; expected a bool, a number or a string");
  if (!folder.empty())
    checkpointer_ = std::make_unique<checkpoint::Checkpointer>(world_, used_folder(folder),
                                                               checkpoint::CheckpointOptions{.keep = options_.keep});
  if (checkpointer_) checkpointer_->lock();
  if (checkpointer_) found_ = checkpointer_->latest();
  if (!found_ && !options_.resume_from.empty())
    found_ = load_from(world_, strip_trailing_slashes(options_.resume_from));
  if (!found_) return;
  check_format(*found_);
  finished_ = value_of<bool>(found_->read(kTrainingPart), kFinishedKey);
}

void TrainingState::require_new_name(const std::string& name) const {
  if (name.size() > kMaxNameLength || !checkpoint::is_part_name(name) || name == kTrainingPart || name == kValuesPart)
    throw UsageError("TrainingState::add: the name is \"" + name +
                     "\"; expected 1 to 60 characters of a-z, A-Z, 0-9, _ and -, except \"training\" and \"values\"");
  const bool is_used =
      std::any_of(members_.begin(), members_.end(), [&](const NamedMember& member) { return member.name == name; }) ||
      std::any_of(values_.begin(), values_.end(), [&](const auto& value) { return value.first == name; }) ||
      (random_ && name == kRandomPart);
  if (is_used) throw UsageError("TrainingState::add: \"" + name + "\" was already added; expected another name");
}

TrainingState& TrainingState::add(const std::string& name, StateMember member) {
  require_new_name(name);
  if (resumed_ && member.hosts_differ && !do_hosts_differ() && found_ &&
      found_->read(kTrainingPart).contains(kHostsKey))
    throw UsageError("TrainingState::add: \"" + name + "\" says that hosts train apart, and was added after resume()",
                     "add it before resume(), so that each host restores the other members from its own state");
  members_.push_back({name, std::move(member)});
  if (resumed_) restore(members_.back());
  return *this;
}

TrainingState& TrainingState::add(const std::string& name, nn::ModuleRef added) {
  torch::nn::Module& module = *added;
  return add(name,
             {.state_dict =
                  [&module] {
                    StateDict state;
                    for (const auto& [key, tensor] : checkpoint::module_state(module)) state[key] = tensor.detach();
                    return state;
                  },
              .load_state_dict = [this, name, &module](const StateDict& state) { load_module(module, name, state); }});
}

TrainingState& TrainingState::add(const std::string& name, torch::optim::Optimizer& optimizer,
                                  nn::ConstModuleRef module) {
  return add(name, optimizer_member(optimizer, module));
}

TrainingState& TrainingState::add(const std::string& name, torch::optim::Optimizer& optimizer,
                                  checkpoint::NamedParameters parameters) {
  return add(name, optimizer_member(optimizer, std::move(parameters)));
}

TrainingState& TrainingState::add(const std::string& name, checkpoint::Stateful& object) {
  if (auto* const fused = dynamic_cast<optim::FusedOptimizer*>(&object)) fused_optimizers_.push_back(fused);
  return add(name, member_of(object));
}

TrainingState& TrainingState::add_each_rank(const std::string& name, checkpoint::Stateful& object) {
  StateMember member = member_of(object);
  member.each_rank = true;
  return add(name, std::move(member));
}

TrainingState& TrainingState::add_random_state() {
  require_new_name(kRandomPart);
  const auto load = [this](const StateDict& state) {
    RandomState random(world_.device());
    if (world_.rank() < found_->world_size())
      random.load_state_dict(state);
    else
      random.derive(state, static_cast<std::uint64_t>(world_.rank()));
  };
  random_ = {kRandomPart,
             {.state_dict = [device = world_.device()] { return RandomState(device).state_dict(); },
              .load_state_dict = load,
              .each_rank = true}};
  if (resumed_) restore(*random_);
  return *this;
}

TrainingState& TrainingState::add(const std::string& name, ddp::DistributedDataParallel& model) {
  return add(name, {.state_dict =
                        [&model] {
                          StateDict state = model.outer_state();
                          state[kLayoutKey] = model.stats().layout;
                          return state;
                        },
                    .load_state_dict = [&model](const StateDict& state) { model.load_outer_state(state); },
                    .hosts_differ = model.hosts_differ()});
}

void TrainingState::add_value(const std::string& name, ValuePointer value) {
  require_new_name(name);
  values_.emplace_back(name, value);
  if (resumed_) restore_value(name, value);
}

StateDict TrainingState::read(const std::string& name, int rank) const {
  if (!found_) throw UsageError("TrainingState::read: there is no checkpoint; expected a training that resumes");
  return found_->read(name, rank);
}

std::string TrainingState::bucket_layout(const std::string& name) const {
  return found_ ? value_of<std::string>(read(name), kLayoutKey) : "";
}

TrainingState& TrainingState::add_setting(const std::string& name, checkpoint::StateValue value, SettingRule rule) {
  if (resumed_) throw UsageError("TrainingState::add_setting() was called after resume(); expected a call before it");
  if (std::holds_alternative<at::Tensor>(value) || settings_.contains(name) || options_.settings.contains(name))
    throw UsageError("TrainingState::add_setting: \"" + name +
                     (std::holds_alternative<at::Tensor>(value)
                          ? "\" is a tensor; expected a bool, a number or a string"
                          : "\" was already added; expected another name"));
  settings_.emplace(name, Setting{std::move(value), rule});
  return *this;
}

void TrainingState::check_setting(const std::string& name, const std::string& now, const std::string& then,
                                  SettingRule rule) const {
  if (now == then) return;
  if (rule == SettingRule::kMustMatch)
    throw UsageError(
        "resume: the setting \"" + name + "\" is " + now + "; expected " + then + ", as in the checkpoint " +
            found_->path(),
        "use the saved setting, or start a new training in another directory; it can load() the weights of the "
        "checkpoint");
  if (world_.rank() == 0)
    base::log_warning("resume: the setting \"" + name + "\" is " + now + ", and was " + then + " in the checkpoint " +
                      found_->path() + "; the training goes on with " + (rule == SettingRule::kUsesNew ? now : then));
}

void TrainingState::check_settings() {
  const StateDict saved = found_->read(kTrainingPart);
  for (const auto& [name, value] : options_.settings) {
    const auto found = saved.find(kSettingPrefix + name);
    check_setting(name, text_of(value), found == saved.end() ? "no such setting" : text_of(found->second),
                  SettingRule::kMustMatch);
  }
  for (const auto& [key, value] : saved) {
    if (!key.starts_with(kSettingPrefix)) continue;
    const std::string name = key.substr(std::string(kSettingPrefix).size());
    if (!options_.settings.contains(name)) check_setting(name, "missing", text_of(value), SettingRule::kMustMatch);
  }
  for (auto& [name, setting] : settings_) {
    const auto found = saved.find(kAddedSettingPrefix + name);
    if (found == saved.end()) continue;
    check_setting(name, text_of(setting.value), text_of(found->second), setting.rule);
    if (setting.rule == SettingRule::kUsesSaved) setting.value = found->second;
  }
}

std::vector<std::string> TrainingState::unknown_parts() const {
  if (!found_) return {};
  std::set<std::string> unknown = found_->part_names();
  for (const NamedMember& entry : members_) unknown.erase(entry.name);
  if (random_) unknown.erase(random_->name);
  unknown.erase(kTrainingPart);
  if (unknown.erase(kValuesPart) > 0)
    for (const auto& [name, value] : found_->read(kValuesPart)) unknown.insert(name);
  for (const auto& [name, pointer] : values_) unknown.erase(name);
  std::erase_if(unknown, [](const std::string& name) { return name.ends_with(kPythonSuffix); });
  return {unknown.begin(), unknown.end()};
}

void TrainingState::check_members(const ResumeOptions& options) const {
  const auto require = [&](const std::string& part) {
    if (!found_->part_names().contains(part))
      throw UsageError("resume: the checkpoint " + found_->path() + " has no state of \"" + part +
                           "\"; expected the state of all members",
                       "start a new training in another directory, or do not add this member", base::Cause::kBadFile);
  };
  for (const NamedMember& entry : members_)
    if (!entry.member.optional) require(entry.name);
  if (random_) require(random_->name);
  if (!values_.empty()) require(kValuesPart);
  const std::vector<std::string> unknown = unknown_parts();
  if (unknown.empty() || options.allow_unknown) return;
  throw UsageError("resume: the checkpoint " + found_->path() + " has state of \"" + unknown.front() +
                       "\", which is not a member; expected only members",
                   "add that member before resume(), or set ResumeOptions.allow_unknown", base::Cause::kBadFile);
}

void TrainingState::restore(const NamedMember& entry) {
  if (!found_) return;
  if (entry.member.optional && !found_->part_names().contains(entry.name)) {
    if (world_.rank() == 0)
      base::log_warning(found_->path() + " has no state of " + entry.name + ", which starts without saved state");
    return;
  }
  entry.member.load_state_dict(read(entry.name, saved_rank(entry)));
}

bool TrainingState::do_hosts_differ() const {
  return std::any_of(members_.begin(), members_.end(), [](const auto& entry) { return entry.member.hosts_differ; });
}

/// Collective when it is called first.
const TrainingState::Hosts& TrainingState::hosts() {
  if (hosts_) return *hosts_;
  const std::vector<int> first_of = ddp::first_ranks_of_hosts(world_, world_.split_by_host());
  hosts_.emplace();
  for (int rank = 0; rank < world_.size(); ++rank) {
    if (first_of[static_cast<std::size_t>(rank)] != rank) continue;
    if (first_of[static_cast<std::size_t>(world_.rank())] == rank)
      hosts_->own = static_cast<int>(hosts_->first_ranks.size());
    hosts_->first_ranks.push_back(rank);
  }
  return *hosts_;
}

/// The rank of the previous job whose state this one resumes from.
int TrainingState::saved_rank(const NamedMember& entry) {
  if (entry.member.each_rank) return world_.rank() < found_->world_size() ? world_.rank() : 0;
  const StateDict training = found_->read(kTrainingPart);
  if (!do_hosts_differ() || !training.contains(kHostsKey)) return 0;
  const at::Tensor& first_ranks = value_of<at::Tensor>(training, kHostsKey);
  return hosts().own < first_ranks.numel() ? first_ranks[hosts().own].item<int>() : 0;
}

void TrainingState::restore_value(const std::string& name, const ValuePointer& value) {
  if (!found_) return;
  const StateDict state = read(kValuesPart);
  const auto load = [&]<typename T>(T* variable) {
    const T& saved = value_of<T>(state, name);
    if constexpr (std::is_same_v<T, at::Tensor>)
      *variable = variable->defined() ? saved.to(variable->device()) : saved;
    else
      *variable = saved;
  };
  std::visit(load, value);
}

bool TrainingState::resume(const ResumeOptions& options) {
  if (resumed_) throw UsageError("TrainingState::resume() was called twice; expected one call");
  resumed_ = true;
  if (!found_) return false;
  if (finished_ && !options.train_on)
    throw UsageError("resume: the training is complete: " + found_->path() +
                         " is its last checkpoint; expected one that is not finished",
                     "return if is_finished(); to train on, set ResumeOptions.train_on");
  check_settings();
  check_members(options);
  for (const NamedMember& entry : members_) restore(entry);
  for (const auto& [name, value] : values_) restore_value(name, value);
  if (random_) restore(*random_);
  comm::GroupAccess::set_steps(world_, found_->step());
  return true;
}

void TrainingState::load_module(torch::nn::Module& module, const std::string& name, const StateDict& state) {
  const auto tensors = checkpoint::module_state(module);
  const auto fail = [&](const std::string& key, const std::string& what) {
    throw UsageError("resume: \"" + key + "\" of \"" + name + "\" " + what + " in " + found_->path() +
                         "; expected the tensors of the module",
                     module.named_buffers().contains(key)
                         ? "keep a buffer that the module computes anew, and whose size changes, in a plain member "
                           "instead of register_buffer()"
                         : "",
                     base::Cause::kBadFile);
  };
  for (const auto& [key, tensor] : tensors) {
    if (!state.contains(key)) fail(key, "is missing");
    const at::Tensor& saved = value_of<at::Tensor>(state, key);
    if (saved.sizes() != tensor.sizes() || saved.scalar_type() != tensor.scalar_type())
      fail(key, "has another shape or dtype");
  }
  for (const auto& [key, value] : state)
    if (!tensors.contains(key)) fail(key, "is unexpected");
  const at::NoGradGuard no_grad;
  std::set<const void*> shared;  // parameters that an optimizer has
  for (optim::FusedOptimizer* const fused : fused_optimizers_) {
    std::set<const void*> mine;
    for (const auto& group : dynamic_cast<torch::optim::Optimizer&>(*fused).param_groups())
      for (const at::Tensor& parameter : group.params()) mine.insert(parameter.const_data_ptr());
    fused->change_parameters([&] {
      for (const auto& [key, tensor] : tensors)
        if (mine.contains(tensor.const_data_ptr())) at::Tensor(tensor).copy_(value_of<at::Tensor>(state, key));
    });
    shared.merge(mine);
  }
  for (const auto& [key, tensor] : tensors)
    if (!shared.contains(tensor.const_data_ptr())) at::Tensor(tensor).copy_(value_of<at::Tensor>(state, key));
}

checkpoint::CheckpointParts TrainingState::parts(const SaveStateOptions& options) {
  checkpoint::CheckpointParts parts;
  const bool saves_for_host =
      do_hosts_differ() && hosts().first_ranks[static_cast<std::size_t>(hosts().own)] == world_.rank();
  const auto put = [&](const NamedMember& entry) {
    StateDict state = entry.member.state_dict();
    if (entry.member.each_rank || world_.rank() == 0 || saves_for_host) parts[entry.name] = std::move(state);
  };
  for (const NamedMember& entry : members_) put(entry);
  if (random_) put(*random_);
  if (world_.rank() != 0) return parts;
  for (const auto& [name, pointer] : values_)
    std::visit([&, key = name](const auto* variable) { parts[kValuesPart][key] = *variable; }, pointer);
  StateDict& training = parts[kTrainingPart] = {{kVersionKey, kFormatVersion}, {kFinishedKey, options.finished}};
  if (do_hosts_differ()) training[kHostsKey] = at::tensor(at::ArrayRef<int>(hosts().first_ranks));
  for (const auto& [name, value] : options_.settings) training[kSettingPrefix + name] = value;
  for (const auto& [name, setting] : settings_) training[kAddedSettingPrefix + name] = setting.value;
  return parts;
}

checkpoint::Checkpointer& TrainingState::checkpointer() {
  if (!checkpointer_) throw UsageError("TrainingState::save: the directory is \"\"; expected a path");
  return *checkpointer_;
}

checkpoint::SaveReport TrainingState::save(std::int64_t step, const SaveStateOptions& options) {
  return checkpointer().save(step, parts(options));
}
void TrainingState::save_async(std::int64_t step, const SaveStateOptions& options) {
  checkpointer().save_async(step, parts(options));
}
bool TrainingState::in_flight() const { return checkpointer_ && checkpointer_->in_flight(); }
std::optional<checkpoint::SaveReport> TrainingState::wait() {
  if (!checkpointer_) return std::nullopt;
  return checkpointer_->wait();  // bounded: by the timeouts of the group and by the disk
}

}  // namespace lockstep::training
