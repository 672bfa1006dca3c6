// What a network costs a training, in words. Pure.
#pragma once

#include <cstdint>
#include <string>

namespace lockstep::launcher {

/// Seconds in which `num_hosts` hosts add `model_bytes` up by a ring all-reduce: 2 (n - 1) / n * bytes / bytes_per_s,
/// with n hosts, when no link is shared and nothing overlaps (Patarasuk and Yuan, "Bandwidth optimal all-reduce
/// algorithms for clusters of workstations", 2009). 0 for one host.
double ring_all_reduce_seconds(std::size_t num_hosts, std::uint64_t model_bytes, double bytes_per_s);

/// "a gigabit network", by the speed that one connection reaches.
std::string network_class(double bytes_per_s);
/// Whether it is one on which the exchange is felt: 1.5 Gb/s or less.
bool is_slow(double bytes_per_s);

/// "0.94 Gb/s".
std::string speed_text(double bytes_per_s);
/// "1.2 s", "35 ms", "0.21 ms".
std::string time_text(double seconds);

/// "this is a gigabit network: N s a step for 250 MB of gradients; at 10 Gb/s M s, on one host K s, exchanging every 8
/// steps J s". N and M: ring_all_reduce_seconds() at `bytes_per_s`, the slowest pair's, and at 1.25e9. J is N / 8, as
/// average_hosts_every = 8 sends. K is model_bytes / copy_bytes_per_s, because in shared memory each rank reads and
/// writes that many bytes in all; it is measured, as the slowest host's core copies memory. Without that speed (0) it
/// is left out.
std::string cost_text(std::size_t num_hosts, std::uint64_t model_bytes, double bytes_per_s, double copy_bytes_per_s);

}  // namespace lockstep::launcher
