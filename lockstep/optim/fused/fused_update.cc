#include "lockstep/optim/fused/fused_update.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "lockstep/base/error.h"
#include "lockstep/comm/reducers/sparse_average.h"
#include "lockstep/optim/kernels/clip_grad.h"
#include "lockstep/optim/fused/fingerprint.h"
#include "lockstep/base/option_check.h"

namespace lockstep::optim {
namespace {

using base::UsageError;

constexpr double kClipEpsilon = 1e-6;  // torch::nn::utils::clip_grad_norm_'s

/// Null when there is nothing to divide: each owner is the only one.
std::unique_ptr<Shards> make_shards(ddp::GradientSource& source, const FusedOptions& options) {
  if (!options.shard_state) return nullptr;
  auto shards = std::make_unique<Shards>(source);
  return shards->divided() ? std::move(shards) : nullptr;
}

bool on_devices(const ddp::GradientSource& source) {
  const auto all = source.parameters();
  return std::any_of(all.begin(), all.end(), [](const auto& parameter) { return !parameter.tensor.device().is_cpu(); });
}

std::vector<at::Tensor> tensors_of(const ParameterHome& home) {
  std::vector<at::Tensor> all;
  for (const auto& parameter : home.parameters()) all.push_back(parameter.tensor);
  return all;
}

}  // namespace

FusedUpdate::FusedUpdate(std::shared_ptr<ddp::GradientSource> source, Rule& rule, const FusedOptions& options)
    : source_(std::move(source)),
      rule_(rule),
      by_operations_(options.by_operations || on_devices(*source_)),
      attached_(*source_, by_operations_ ? nullptr : this),
      shards_(make_shards(*source_, options)),
      home_(source_, rule.state_names().size(), rule.measures() ? 2 : 1, attached_.gives_pieces, shards_.get()) {
  if (by_operations_) tensors_.emplace(home_, rule_, shards_ != nullptr);
  for (std::size_t part = 0; part < home_.parameters().size() && rule_.initial_state() != 0; ++part) start_state(part);
}

FusedUpdate::~FusedUpdate() = default;

void FusedUpdate::step() {
  if (in_backward_) {
    source_->require_unchanged();
    updated_ = false;
    return source_->sharers().step();
  }
  require_one_scale();
  if (source_->backwards() != clip_.backward) clip_ = {};
  update_all(prepare());
  home_.note_changes();  // parameters may have been averaged between hosts besides
  end_step();
}

void FusedUpdate::skip_step() { end_step(); }

bool FusedUpdate::step_unless(const at::Tensor& skip) {
  if (!tensors_ || in_backward_) return false;
  const std::uint64_t options = prepare();
  if (!rule_.can_skip()) return false;
  skip_ = skip;
  update_all(options);
  skip_.reset();
  end_step();
  return true;
}

void FusedUpdate::settle() {
  if (tensors_) tensors_->settle();
}

void FusedUpdate::end_step() {
  clip_ = {};
  unscaling_.reset();
  source_->sharers().step();
}

double FusedUpdate::factor() const { return unscaling_ ? unscaling_->inverse * clip_.factor : clip_.factor; }

/// What came after unscale() is scaled.
void FusedUpdate::require_one_scale() {
  if (!unscaling_ || unscaling_->backward == source_->backwards()) return;
  unscaling_.reset();
  throw UsageError("backward() came after GradScaler::unscale_(), so that scaled gradients were added to unscaled ones",
                   "call zero_grad(), and in each step unscale_() after the last backward()");
}

/// Of an update; a fingerprint of it.
std::uint64_t FusedUpdate::prepare() {
  home_.require_untouched();
  return fingerprint({factor(), clip_.max, std::bit_cast<double>(rule_.prepare())});
}

/// Before the first update of a part; one of those who share the memory writes it, before it takes part in an update.
void FusedUpdate::start_state(std::size_t part) {
  for (const at::Tensor& state : home_.states(part))
    if (home_.first()) state.fill_(rule_.initial_state());
}

void FusedUpdate::measure(std::uint64_t options) {
  summed_.assign(home_.parameters().size(), false);
  measuring_ = true;
  pass(comm::Use::kNorm, options);
  if (shards_) shards_->add(home_.all_sums());
  for (std::size_t part = 0; part < summed_.size(); ++part) {
    Squares all{};
    for (std::size_t i = 0; summed_[part] && i < home_.num_sums(part); ++i) {
      all.parameter += home_.sums(part, 0)[i];
      all.step += home_.sums(part, 1)[i];
    }
    if (summed_[part]) rule_.measured(part, all);
  }
}

void FusedUpdate::update_in_backward(bool on) {
  if (on && rule_.measures())
    throw UsageError(
        "update_in_backward(): this optimizer needs the norms of whole parameters and their gradients before it "
        "updates",
        "do without update_in_backward()");
  if (on) home_.require_own_storages();
  source_->update_in_backward(on ? this : nullptr);
  in_backward_ = on;
  updated_ = false;
  clip_ = {};
  unscaling_.reset();
}

std::uint64_t FusedUpdate::begin_update() {
  if (updated_)
    throw UsageError(
        "backward(): the one before has updated parameters (update_in_backward()), and step() has not been called "
        "since",
        "to accumulate gradients, do without update_in_backward()");
  return options_ = prepare();
}

void FusedUpdate::end_update(bool given) {
  if (!given) update_all(options_);
  home_.note_changes();
  updated_ = true;
}

void FusedUpdate::average_gradients() {
  if (in_backward_)
    throw UsageError("average_gradients(): backward() has updated parameters already (update_in_backward())");
  require_one_scale();
  source_->average();
  if (!unscaling_) return;
  const at::NoGradGuard no_grad;
  for (const auto& parameter : home_.parameters())
    if (parameter.tensor.grad().defined()) parameter.tensor.mutable_grad().mul_(unscaling_->inverse);
  unscaling_.reset();
}

amp::Unscaled FusedUpdate::unscale(double inverse_scale) {
  if (in_backward_)
    throw UsageError(
        "GradScaler: backward() updates parameters before all gradients are known to be finite (update_in_backward())",
        "do without update_in_backward()");
  if (clip_.asked && clip_.backward == source_->backwards())
    throw UsageError(
        "GradScaler::unscale_(): clip_grad_norm() or clip_grad_value() has been called before, for scaled gradients",
        "call unscale_() before they are clipped");
  unscaling_.reset();
  if (!source_->own_gradients()) return amp::Unscaled::kInPlace;
  home_.require_untouched();
  const double sum = squares();
  if (std::find(summed_.begin(), summed_.end(), true) == summed_.end()) return amp::Unscaled::kNothing;
  unscaling_ = {inverse_scale, source_->backwards(), sum};
  return std::isfinite(sum) ? amp::Unscaled::kFinite : amp::Unscaled::kNotFinite;
}

/// Before what `call` asks for gradients of the last backward().
void FusedUpdate::require_clippable(const std::string& call) const {
  if (in_backward_)
    throw UsageError(call + "(): backward() has updated parameters already (update_in_backward())",
                     "do without update_in_backward()");
  home_.require_untouched();
}

at::Tensor FusedUpdate::clip_grad_norm(double max_norm) {
  require(max_norm > 0, "clip_grad_norm", "max_norm", max_norm, "more than 0");
  require_clippable("clip_grad_norm");
  if (tensors_) return optim::clip_grad_norm(tensors_of(home_), max_norm);
  require_one_scale();
  if (clip_.backward != source_->backwards()) clip_ = {};
  if (std::isfinite(clip_.max))
    throw UsageError("clip_grad_norm(): clip_grad_value() has been called before, and cuts values when they are read",
                     "call clip_grad_norm() before clip_grad_value()");
  // Gradients that are this rank's own are not changed in between: step() would refuse them.
  const double norm = unscaling_ ? std::sqrt(unscaling_->squares) * unscaling_->inverse : std::sqrt(squares());
  const double coefficient = max_norm / (norm + kClipEpsilon);
  clip_ = {.factor = coefficient > 1 ? 1 : coefficient, .backward = source_->backwards(), .asked = true};
  return at::scalar_tensor(norm, at::kDouble);
}

void FusedUpdate::clip_grad_value(double max) {
  require(max > 0, "clip_grad_value", "max", max, "more than 0");
  require_clippable("clip_grad_value");
  if (tensors_) return optim::clip_grad_value(tensors_of(home_), max);
  require_one_scale();
  if (clip_.backward != source_->backwards()) clip_ = {};
  clip_.max = std::min(clip_.max, max);
  clip_.backward = source_->backwards();
  clip_.asked = true;
}

/// Of all gradients, summed in one pass.
double FusedUpdate::squares() {
  summed_.assign(home_.parameters().size(), false);
  measuring_ = false;
  pass(comm::Use::kNorm, 0);
  double sum = 0;
  for (std::size_t part = 0; part < summed_.size(); ++part)
    for (std::size_t i = 0; summed_[part] && i < home_.num_sums(part); ++i) sum += home_.sums(part)[i];
  return sum;
}

void FusedUpdate::pass(comm::Use use, std::uint64_t options) {
  struct Meanwhile {
    Meanwhile(comm::Use& place, comm::Use now) : place_(place) { place_ = now; }
    ~Meanwhile() { place_ = comm::Use::kUpdate; }  // for those whom this rank keeps company
    comm::Use& place_;
  } const meanwhile(use_, use);
  const at::NoGradGuard no_grad;
  if (attached_.gives_pieces)
    source_->give(use, options, *this);
  else if (tensors_)
    pass_by_operations();
  else
    pass_alone();
}

void FusedUpdate::pass_by_operations() {
  tensors_->update(skip_, [this](std::size_t part) { rule_.updated(part, home_.states(part)); });
}

void FusedUpdate::update_all(std::uint64_t options) {
  if (rule_.measures() && !tensors_) measure(options);
  pass(comm::Use::kUpdate, options);
  if (shards_) shards_->share_parameters(options);
  source_->updated();
}

/// Over this rank's own gradients.
void FusedUpdate::pass_alone() {
  const auto& parameters = home_.parameters();
  for (std::size_t part = 0; part < parameters.size(); ++part) {
    const at::Tensor& tensor = parameters[part].tensor;
    const at::Tensor& gradient = tensor.grad();
    if (!gradient.defined()) continue;
    if (gradient.layout() != at::kStrided) comm::refuse_sparse(parameters[part].name);
    at::Tensor likewise;
    if (gradient.strides() != tensor.strides() || gradient.scalar_type() != tensor.scalar_type())
      likewise =
          at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().requires_grad(false)).copy_(gradient);
    const void* data = likewise.defined() ? likewise.const_data_ptr() : gradient.const_data_ptr();
    const auto count = static_cast<std::size_t>(tensor.numel());
    if (count > 0) take({.part = part, .count = count, .gradients = &data, .num_gradients = 1});
    taken(part);
  }
}

Run FusedUpdate::run_of(const comm::Piece& piece) const {
  const bool as_they_are = use_ == comm::Use::kNorm && !measuring_;
  const at::Tensor& tensor = home_.parameters()[piece.part].tensor;
  return {.dtype = tensor.scalar_type(),
          .gradients = piece.gradients,
          .num_gradients = piece.num_gradients,
          .divisor = static_cast<double>(piece.divisor),
          .scale = as_they_are ? 1 : factor(),
          .max = as_they_are ? std::numeric_limits<double>::infinity() : clip_.max,
          .parameter = static_cast<char*>(tensor.mutable_data_ptr()) + piece.first * tensor.element_size(),
          .states = nullptr,
          .count = piece.count};
}

/// Calls act(run) for the elements [first, end) of a piece, with their state if all of it is here.
template <typename Act>
void FusedUpdate::with_run(const comm::Piece& piece, std::size_t first, std::size_t end, const Act& act) const {
  Run run = run_of(piece);
  const std::size_t skipped = (first - piece.first) * c10::elementSize(run.dtype);
  c10::SmallVector<const void*, 16> gradients(piece.gradients, piece.gradients + piece.num_gradients);
  for (const void*& gradient : gradients) gradient = static_cast<const char*>(gradient) + skipped;
  c10::SmallVector<void*, 4> states;
  const Range own = home_.own(piece.part);
  const bool here = first >= own.first && end <= own.first + own.count;
  for (std::size_t i = 0; here && i < home_.states(piece.part).size(); ++i) {
    const at::Tensor& state = home_.states(piece.part)[i];
    states.push_back(static_cast<char*>(state.mutable_data_ptr()) + (first - own.first) * state.element_size());
  }
  run.gradients = gradients.data();
  run.parameter = static_cast<char*>(run.parameter) + skipped;
  run.states = states.data();
  run.count = end - first;
  act(run);
}

void FusedUpdate::take(const comm::Piece& piece) {
  const Range own = home_.own(piece.part);
  const auto with_state = [&](std::size_t first, std::size_t end, const auto& act) {
    first = std::max(first, own.first);
    end = std::min(end, own.first + own.count);
    if (first < end) with_run(piece, first, end, act);
  };
  const std::size_t stop = piece.first + piece.count;
  if (use_ == comm::Use::kUpdate)
    return with_state(piece.first, stop, [&](const Run& run) { rule_.update(piece.part, run); });
  for (std::size_t first = piece.first; first < stop; first += ParameterHome::kSumElements) {
    const std::size_t end = std::min(first + ParameterHome::kSumElements, stop),
                      place = first / ParameterHome::kSumElements;
    Squares squares{};
    if (measuring_)
      with_state(first, end, [&](const Run& run) { squares = rule_.measure(piece.part, run); });
    else
      with_run(piece, first, end, [&](const Run& run) { squares.parameter = sum_of_squares(run); });
    home_.sums(piece.part, 0)[place] = squares.parameter;
    if (measuring_) home_.sums(piece.part, 1)[place] = squares.step;
  }
}

void FusedUpdate::taken(std::size_t part) {
  if (use_ == comm::Use::kNorm) {
    summed_[part] = true;
    return;
  }
  rule_.updated(part, home_.states(part));
  home_.note_update(part);
}

void FusedUpdate::change_parameters(const std::function<void()>& change) {
  comm::Group& group = source_->sharers();
  group.barrier({.name = "change_parameters"});  // nobody reads them any more
  if (home_.first()) change();
  group.barrier({.name = "change_parameters"});
  home_.note_changes();
}

void FusedUpdate::adopt_loaded() {
  const at::NoGradGuard no_grad;
  if (tensors_) tensors_->recount();
  std::vector<std::vector<at::Tensor>> loaded;
  std::string misshapen;  // all are looked at before any is kept
  for (std::size_t part = 0; part < home_.parameters().size(); ++part) {
    loaded.push_back(rule_.states(part));
    for (std::size_t i = 0; i < loaded[part].size(); ++i) {
      at::Tensor& one = loaded[part][i];
      if (one.defined() && one.is_same(home_.states(part)[i])) one.reset();
      if (one.defined() && one.sizes() != home_.parameters()[part].tensor.sizes())
        misshapen = rule_.state_names()[i] + " of " + home_.parameters()[part].name;
    }
    if (rule_.steps(part) > 0) rule_.set_states(part, rule_.steps(part), home_.states(part));
  }
  if (!misshapen.empty())
    throw UsageError("lockstep::optim: the loaded " + misshapen +
                         " has another shape; the counts of steps have been loaded, the rest has not",
                     shards_ ? "an archive that torch saves has this rank's part of the state alone: use state_dict() "
                               "and load_state_dict()"
                             : "");
  for (std::size_t part = 0; part < loaded.size(); ++part)
    for (std::size_t i = 0; i < loaded[part].size(); ++i)
      if (loaded[part][i].defined()) home_.keep(part, i, loaded[part][i]);
}

std::vector<std::pair<std::string, at::Tensor>> FusedUpdate::state_dict(bool copies) {
  settle();
  std::vector<std::pair<std::string, at::Tensor>> all;
  for (std::size_t part = 0; part < home_.parameters().size(); ++part) {
    if (rule_.steps(part) == 0) continue;
    const std::string& name = home_.parameters()[part].name;
    all.emplace_back(name + ".step", at::scalar_tensor(rule_.steps(part), at::kLong));
    for (std::size_t i = 0; i < home_.states(part).size(); ++i)
      all.emplace_back(name + "." + rule_.state_names()[i], shards_  ? shards_->gather(part, home_.states(part)[i])
                                                            : copies ? home_.states(part)[i].clone()
                                                                     : home_.states(part)[i].detach());
  }
  return all;
}

void FusedUpdate::load_state_dict(const std::vector<std::pair<std::string, at::Tensor>>& state) {
  std::map<std::string, at::Tensor> left(state.begin(), state.end());
  const auto require = [&](const std::string& name, at::IntArrayRef sizes) {
    const auto found = left.find(name);
    if (found == left.end()) throw UsageError("load_state_dict: \"" + name + "\" is missing");
    if (found->second.sizes() != sizes)
      throw UsageError("load_state_dict: \"" + name + "\" has " + std::to_string(found->second.numel()) +
                       " elements in another shape than its parameter");
    return left.extract(found).mapped();
  };
  struct Loaded {
    std::int64_t steps = 0;
    std::vector<at::Tensor> states;
  };
  std::vector<Loaded> loaded;  // checked whole before anything changes
  for (const auto& [name, tensor] : home_.parameters()) {
    Loaded& one = loaded.emplace_back();
    if (!left.contains(name + ".step")) continue;
    one.steps = require(name + ".step", {}).item<std::int64_t>();
    for (const std::string& kind : rule_.state_names())
      one.states.push_back(require(name + "." + kind, tensor.sizes()));
  }
  if (!left.empty())
    throw UsageError("load_state_dict: \"" + left.begin()->first + "\" belongs to no parameter; " +
                     std::to_string(left.size()) + " names are unexpected");
  const at::NoGradGuard no_grad;
  source_->sharers().barrier({.name = "load_state_dict"});
  for (std::size_t part = 0; part < loaded.size(); ++part) {
    for (std::size_t i = 0; home_.first() && i < loaded[part].states.size(); ++i)
      home_.keep(part, i, loaded[part].states[i]);
    if (loaded[part].steps == 0) start_state(part);
    rule_.set_states(part, loaded[part].steps, home_.states(part));
  }
  if (tensors_) tensors_->recount();
  source_->sharers().barrier({.name = "load_state_dict"});
}

}  // namespace lockstep::optim
