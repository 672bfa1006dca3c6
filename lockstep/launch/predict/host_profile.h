// The steps of a program on this host, and what an exchange between hosts costs its CPU.
#pragma once

#include <string>
#include <vector>

namespace lockstep::launcher::predict {

/// A gradient, in the order in which backward() computes them.
struct Gradient {
  double bytes = 0;              ///< of its parameter, in the parameter's dtype
  double rows = 0, columns = 0;  ///< of the parameter as a matrix: its first dimension, and the product of the others
  bool is_float32 = true;
  double lead_s = 0;  ///< from the time when it is ready to the end of backward()
};

/// The steps of a program on one host. The ranks of this host make them together.
struct HostProfile {
  int ranks = 1;
  std::vector<double> steps_s;  ///< duration of each step, with what the host's ranks exchange in it
  struct Model {
    double passes_per_step = 1;  ///< backward() calls that average its gradients
    std::vector<Gradient> gradients;
  };
  std::vector<Model> models;
};

/// What an exchange costs on this host.
struct HostCosts {
  double wire_s_per_byte = 0;    ///< CPU time to send one byte and to receive one
  double memory_s_per_byte = 0;  ///< CPU time to copy one byte in memory
  bool shares_cores = true;      ///< ranks have no core left for the exchange
};

/// Returns the steps that these files of ddp/step_profile.h, one of each rank, describe: the slowest rank's steps, and
/// of each gradient the shortest time until the end of backward(). Throws FormatError for a text that is not such a
/// file. Pure.
HostProfile parse_profiles(const std::vector<std::string>& files);

/// 0 without values.
double average_of(const std::vector<double>& values);
double gradient_bytes(const HostProfile& profile);

/// Copies 64 MiB in memory, and sends as many to itself over TCP on loopback, on one thread: some 0.2 s. Does not set
/// `shares_cores`. Throws SystemError.
HostCosts measure_host_costs();

}  // namespace lockstep::launcher::predict
