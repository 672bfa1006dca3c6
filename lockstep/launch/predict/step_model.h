// Predicts the time of a training step on other clusters from the steps of one host. Pure functions.
#pragma once

#include "lockstep/launch/predict/host_profile.h"

namespace lockstep::launcher::predict {

/// Hosts with equal links to one switch that is never the limit.
struct Cluster {
  int hosts = 2;
  double bytes_per_s = 0;  ///< payload, in each direction
  double latency_s = 0;    ///< one way
};

enum class Method {
  kFloat32,   ///< gradients in every step
  kBfloat16,  ///< the same, rounded for the wire
  kInt8,      ///< the same, as int8 with error feedback
  kPowerSgd,  ///< factors of rank 4 of the gradients, in every step
  kAverage,   ///< the mean of the parameters, every so many steps
  kDiLoCo,    ///< DiLoCo with int8
  kSparseLoCo,
};
struct MethodName {
  Method method;
  const char* name;
};
inline constexpr MethodName kMethods[] = {
    {Method::kFloat32, "float32"},      {Method::kBfloat16, "bfloat16"}, {Method::kInt8, "int8"},
    {Method::kPowerSgd, "PowerSGD"},    {Method::kAverage, "average"},   {Method::kDiLoCo, "DiLoCo"},
    {Method::kSparseLoCo, "SparseLoCo"}};
inline bool exchanges_each_step(Method method) { return method <= Method::kPowerSgd; }

struct Prediction {
  double step_s = 0;  ///< mean
  double low_s = 0, high_s = 0;
  double exposed_s = 0;  ///< the part of it in which ranks only wait for the network, on average
  double bytes = 0;      ///< that a host sends per step, and receives
};

/// Returns the mean time of a step. Every so many steps (`every`) the methods for slow networks exchange.
///
/// The model: backward() makes gradients ready at the recorded times; they fill the buckets of DdpOptions.bucket_bytes;
/// buckets pass one after the other, each in the time of its bytes on the link (2 (n-1)/n of them, a reduce-scatter and
/// an all-gather: Thakur et al., "Optimization of Collective Communication Operations in MPICH", 2005) or of the CPU,
/// if that is longer, and of its messages (Culler et al., "LogP", 1993). What is left after backward() lengthens the
/// step; this replay of recorded tasks on resources that serve them in turn is Daydream's (Zhu et al., USENIX ATC
/// 2020). Without a free core, the CPU's part lengthens backward(), too. All hosts wait for the slowest: the expected
/// maximum of as many draws from the recorded steps, or for rounds, of means of `every` draws.
///
/// The interval holds 90 % of the means that resampled steps give (Efron's bootstrap), and a part of the time for what
/// the model leaves out, which grows beyond the four hosts with which it was compared.
Prediction predict_step(const HostProfile& profile, const HostCosts& costs, const Cluster& cluster, Method method,
                        int every);

}  // namespace lockstep::launcher::predict
