// Outer optimizers: how hosts that have trained apart for some steps become equal again.
#pragma once

#include <concepts>
#include <type_traits>
#include <variant>

namespace lockstep::ddp::inline outer {

/// What numbers are sent as. int8 has a float32 scale per 256 numbers, and int4 a bfloat16 scale per 64: 1.016 and 0.53
/// bytes a number. What rounding has lost is added to the numbers of the next round (error feedback).
enum class Payload { kFloat32, kBFloat16, kInt8, kInt4 };

/// DiLoCo (Douillard and others, 2023, https://arxiv.org/abs/2311.08105). Every host keeps a copy of the parameters
/// that all hosts have in common. In a round, the mean over the hosts of (copy - parameters) is a gradient for the
/// copy, which SGD with Nesterov momentum updates, and all hosts go on from it.
struct DiLoCo {
  /// 0: by the number of hosts, after Charles and others, 2025 (https://arxiv.org/abs/2503.09799): 0.5 for one host,
  /// 0.6 for 2, 0.7 for 3 and 4, 0.9 for more.
  double learning_rate = 0;
  double momentum = 0.9;
  Payload payload = Payload::kFloat32;
  /// So many steps at the start, the hosts take the mean of their parameters after each step, and the outer optimizer
  /// begins after them.
  int warm_up = 0;
};

/// SparseLoCo (Sarfi and others, 2025, https://arxiv.org/abs/2508.15706). As DiLoCo, without momentum; of each 4096
/// numbers a host sends only the `keep` largest, with 2 bits each, and keeps the rest for later rounds.
struct SparseLoCo {
  double learning_rate = 1;
  double error_decay = 0.95;  ///< what was not sent is multiplied by it in each round
  int keep = 64;              ///< of 4096 numbers
  int warm_up = 0;            ///< as in DiLoCo
};

/// std::monostate: the hosts take the mean of their parameters (Local SGD: Lin, Stich, Patel, Jaggi, 2018,
/// https://arxiv.org/abs/1808.07217).
using OuterMethod = std::variant<std::monostate, DiLoCo, SparseLoCo>;

/// Calls visit(name, member) for each member of a struct above, as visit_options() of DdpOptions does.
template <typename Visitor>
void visit_outer(std::monostate, Visitor&&) {}
template <typename Options, typename Visitor>
  requires std::same_as<std::remove_const_t<Options>, DiLoCo>
void visit_outer(Options& options, Visitor&& visit) {
  auto& [learning_rate, momentum, payload, warm_up] = options;
  visit("learning_rate", learning_rate);
  visit("momentum", momentum);
  visit("payload", payload);
  visit("warm_up", warm_up);
}
template <typename Options, typename Visitor>
  requires std::same_as<std::remove_const_t<Options>, SparseLoCo>
void visit_outer(Options& options, Visitor&& visit) {
  auto& [learning_rate, error_decay, keep, warm_up] = options;
  visit("learning_rate", learning_rate);
  visit("error_decay", error_decay);
  visit("keep", keep);
  visit("warm_up", warm_up);
}

}  // namespace lockstep::ddp::inline outer
