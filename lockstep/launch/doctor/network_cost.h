// Estimates what a network costs a training step, as text. Pure.
#pragma once

#include <cstdint>
#include <string>

namespace lockstep::launcher::doctor {

/// Returns the seconds in which `num_hosts` hosts reduce `model_bytes` by a ring all-reduce: 2 (n - 1) / n * bytes /
/// bytes_per_s for n hosts, if no link is shared and nothing overlaps (Patarasuk and Yuan, "Bandwidth optimal
/// all-reduce algorithms for clusters of workstations", 2009). Returns 0 for one host.
double ring_all_reduce_seconds(std::size_t num_hosts, std::uint64_t model_bytes, double bytes_per_s);

/// Returns the class of a network by the speed of one connection, such as "a gigabit network".
std::string network_class(double bytes_per_s);
/// Returns whether communication dominates a training step on such a network: whether it has 1.5 Gb/s or less.
bool is_slow(double bytes_per_s);

/// Returns "0.94 Gb/s".
std::string speed_text(double bytes_per_s);
/// Returns "1.2 s", "35 ms" or "0.21 ms".
std::string time_text(double seconds);

/// Returns "this is a gigabit network: N s per step for 250 MB of gradients; M s at 10 Gb/s, K s on one host, J s when
/// hosts exchange every 8 steps". N is ring_all_reduce_seconds() at `bytes_per_s`, the speed of the slowest link, and M
/// the same at 1.25e9 bytes/s. J is N / 8, as with average_hosts_every = 8. K is model_bytes / copy_bytes_per_s,
/// because in shared memory each rank reads and writes that many bytes in all; `copy_bytes_per_s` is the measured speed
/// at which a core of the slowest host copies memory. If it is 0, K is left out.
std::string cost_text(std::size_t num_hosts, std::uint64_t model_bytes, double bytes_per_s, double copy_bytes_per_s);

}  // namespace lockstep::launcher::doctor
