// Saves and resumes a training: one object that gathers everything that the training consists of.
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/checkpoint/module_io.h"
#include "lockstep/checkpoint/optimizer_state.h"
#include "lockstep/checkpoint/stateful.h"
#include "lockstep/comm/group.h"
#include "lockstep/nn/module_ref.h"
#include "lockstep/train/random_state.h"

namespace lockstep::ddp {
class DistributedDataParallel;
}  // namespace lockstep::ddp
namespace lockstep::optim::inline fused {
class FusedOptimizer;
}  // namespace lockstep::optim::inline fused

namespace lockstep::training {

struct TrainingStateOptions {
  int keep = 2;  ///< how many of the latest complete checkpoints to keep; 2 or more
  /// Values that a resumed training must share with the saved one, such as the batch size or the precision. They are
  /// saved, and resume() compares them. No tensors.
  checkpoint::StateDict settings = {};
  /// The checkpoint to resume from if the directory has none: the path of a checkpoint, of a directory of checkpoints,
  /// or of a directory that contains one named "checkpoints". "": none.
  std::string resume_from = {};
};

struct ResumeOptions {
  bool allow_unknown = false;  ///< true: state in the checkpoint that no member has is ignored instead of an error
  bool train_on = false;       ///< true: a complete training is resumed, to train it further, instead of an error
};

/// What resume() does if a setting has another value than in the checkpoint.
enum class SettingRule {
  kMustMatch,  ///< an error
  kUsesNew,    ///< a warning; the training goes on with the program's value
  kUsesSaved,  ///< a warning; the training goes on with the saved value
};

struct SaveStateOptions {
  bool finished = false;  ///< the training is complete; see TrainingState::is_finished()
};

/// A member of a TrainingState in its general form.
struct StateMember {
  std::function<checkpoint::StateDict()> state_dict;  ///< all ranks call it
  std::function<void(const checkpoint::StateDict&)>
      load_state_dict;     ///< receives the state that this rank resumes from
  bool each_rank = false;  ///< true: each rank saves a state of its own; false: rank 0 saves the state of all ranks
  bool optional = false;   ///< true: a checkpoint without this state is a warning instead of an error
  /// True: the hosts train apart, as with DdpOptions.average_hosts_every. Then the first rank of each host saves all
  /// members, and a host resumes from its own; one that did not exist, from those of rank 0.
  bool hosts_differ = false;
};

/// Returns the member that saves and loads `object`, which must outlive it.
StateMember member_of(checkpoint::Stateful& object);

/// The state of a training: its model, optimizers, schedules, loss scaler, averages, loader, random numbers and user
/// values. Add all members, then call resume(), then train and save:
///
///   lockstep::training::TrainingState state(world, "runs/digits/checkpoints", {.settings = {{"batch_size", 64}}});
///   if (state.is_finished()) return;  // an earlier start has completed the training
///   state.add("model", net).add("optimizer", optimizer).add("loader", loader).add_random_state();
///   state.resume();
///   for (const std::uint64_t epoch : loader.remaining_epochs(10)) {
///     for (auto& batch : loader.epoch(epoch)) ...
///     state.save_async(step);
///   }
///   state.save(step, {.finished = true});
///
/// Started again after that, the program trains nothing: resume() refuses a complete training unless it is told to
/// train on.
///
/// A training that resumes is bit-equal to one without the interruption if everything that changes from step to step is
/// a member, and, between hosts, if its models get their bucket_layout(). With DdpOptions.average_hosts_every or outer,
/// add the DistributedDataParallel too: then each host saves its own parameters, optimizers and outer state.
///
/// Members must exist until the last call of resume(), save() or save_async(). A member's name is that of the files in
/// the checkpoint: 1 to 60 characters of a-z, A-Z, 0-9, _ and -, used once; "training" and "values" are reserved.
/// Collective: all ranks construct it and call its functions in the same order with the same arguments, unless stated
/// otherwise. Used by one thread.
class TrainingState {
 public:
  /// Creates and locks the directory, and finds the checkpoint to resume from: the latest complete one, of which every
  /// byte is verified, else TrainingStateOptions.resume_from. Blocks until all ranks have the result. `folder` "":
  /// nothing can be saved or is locked, to read the state of a training that may be running. Throws UsageError for
  /// invalid options, for a path without a checkpoint and, as FOLDER_IN_USE, if another training has the directory; and
  /// SystemError; on all ranks.
  TrainingState(comm::Group world, const std::string& folder, TrainingStateOptions options = {});
  TrainingState(const TrainingState&) = delete;
  TrainingState& operator=(const TrainingState&) = delete;

  // The functions that add a member. Each throws UsageError for a name that is invalid or in use. A member that is
  // added after resume() is restored at once. None of them blocks before resume().

  /// A module: its parameters and buffers. resume() throws UsageError, before it changes the module, for tensors that
  /// are missing or unexpected or have another shape or dtype. Parameters that ranks share are written in
  /// change_parameters() of their optimizer, which must be a member; after resume() it is added before the module.
  TrainingState& add(const std::string& name, nn::ModuleRef module);
  /// An optimizer of torch, whose state is saved under the names of `module`, or under explicit names.
  TrainingState& add(const std::string& name, torch::optim::Optimizer& optimizer, nn::ConstModuleRef module);
  TrainingState& add(const std::string& name, torch::optim::Optimizer& optimizer,
                     checkpoint::NamedParameters parameters);
  /// An object whose state is equal on all ranks: an optimizer of lockstep::optim, a schedule, a GradScaler, an Ema, a
  /// loader, or your own.
  TrainingState& add(const std::string& name, checkpoint::Stateful& object);
  /// An object with a state of its own on each rank. A rank that did not exist in the previous job loads the state of
  /// rank 0.
  TrainingState& add_each_rank(const std::string& name, checkpoint::Stateful& object);
  /// The random number generators of each rank. A rank that did not exist in the previous job derives a state of its
  /// own. Restored after all other members.
  TrainingState& add_random_state();
  /// The bucket layout of a model, which decides the order of additions between hosts. It is not restored, because a
  /// model gets it at construction: pass bucket_layout() to DdpOptions.bucket_layout. And outer_state(), if hosts train
  /// apart.
  TrainingState& add(const std::string& name, ddp::DistributedDataParallel& model);
  /// A variable, which must be equal on all ranks.
  template <typename T>
    requires std::same_as<T, bool> || std::same_as<T, std::int64_t> || std::same_as<T, double> ||
             std::same_as<T, std::string> || std::same_as<T, at::Tensor>
  TrainingState& add(const std::string& name, T& value) {
    add_value(name, &value);
    return *this;
  }
  /// A member in its general form.
  TrainingState& add(const std::string& name, StateMember member);
  /// A value that resume() compares with the saved one, according to `rule`. A checkpoint without this setting is no
  /// difference. Later checkpoints have the value with which the training goes on. Call it before resume(). Throws
  /// UsageError for a tensor and for a name that is in use.
  TrainingState& add_setting(const std::string& name, checkpoint::StateValue value, SettingRule rule);

  /// Restores all members from the checkpoint that the constructor found, and continues its numbering of steps
  /// (Group::steps()). Returns false, and changes nothing, if there is none. Before it changes anything, throws
  /// UsageError for a checkpoint of a newer format, for the last checkpoint of a complete training, for a setting with
  /// another value, for a member whose state the checkpoint does not have, and for state that no member has; otherwise
  /// as load_state_dict() of the members does.
  bool resume(const ResumeOptions& options = {});

  /// Writes a checkpoint of all members and returns when it is durable. Errors as in Checkpointer::save().
  checkpoint::SaveReport save(std::int64_t step, const SaveStateOptions& options = {});
  /// Copies the state of all members and returns; a background thread writes the copy. Errors as in
  /// Checkpointer::save_async().
  void save_async(std::int64_t step, const SaveStateOptions& options = {});
  /// Returns whether a save is in flight on this rank. Local; does not block.
  bool in_flight() const;
  /// Waits for the save in flight, as Checkpointer::wait() does.
  std::optional<checkpoint::SaveReport> wait();

  /// The checkpoint that the training resumes from; nullopt for a new training. Local, as are the following functions.
  const std::optional<checkpoint::SavedCheckpoint>& found() const { return found_; }
  /// The step of that checkpoint; 0 for a new training.
  std::int64_t step() const { return found_ ? found_->step() : 0; }
  /// Returns whether that checkpoint was saved as the last one of a complete training: there is nothing left to do.
  bool is_finished() const { return finished_; }
  /// The names of the saved members and values that no member of this object has.
  std::vector<std::string> unknown_parts() const;
  /// The saved layout of the model that was added as `name`; "" for a new training.
  std::string bucket_layout(const std::string& name) const;
  /// Reads the state that a rank of the previous job saved. Call it only if there is a checkpoint. Throws UsageError
  /// for a name that the checkpoint does not have.
  checkpoint::StateDict read(const std::string& name, int rank = 0) const;

 private:
  using ValuePointer = std::variant<bool*, std::int64_t*, double*, std::string*, at::Tensor*>;
  struct NamedMember {
    std::string name;
    StateMember member;
  };
  void add_value(const std::string& name, ValuePointer value);
  void require_new_name(const std::string& name) const;
  struct Setting {
    checkpoint::StateValue value;
    SettingRule rule;
  };
  void check_setting(const std::string& name, const std::string& now, const std::string& then, SettingRule rule) const;
  void check_settings();
  void check_members(const ResumeOptions& options) const;
  void restore(const NamedMember& entry);
  void restore_value(const std::string& name, const ValuePointer& value);
  void load_module(torch::nn::Module& module, const std::string& name, const checkpoint::StateDict& state);
  checkpoint::CheckpointParts parts(const SaveStateOptions& options);
  bool do_hosts_differ() const;
  struct Hosts {
    std::vector<int> first_ranks;
    int own = 0;  // index of this rank's host
  };
  const Hosts& hosts();
  int saved_rank(const NamedMember& entry);
  checkpoint::Checkpointer& checkpointer();

  comm::Group world_;
  const TrainingStateOptions options_;
  std::unique_ptr<checkpoint::Checkpointer> checkpointer_;  // null if `folder` is empty
  std::optional<checkpoint::SavedCheckpoint> found_;
  bool finished_ = false, resumed_ = false;
  std::map<std::string, Setting> settings_;
  std::vector<NamedMember> members_;
  std::optional<Hosts> hosts_;
  std::optional<NamedMember> random_;
  std::vector<std::pair<std::string, ValuePointer>> values_;
  std::vector<optim::FusedOptimizer*> fused_optimizers_;
};

}  // namespace lockstep::training
