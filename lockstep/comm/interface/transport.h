// What carries bytes between ranks. docs/05-adding-a-transport.md shows how to add one.
#pragma once

#include <ATen/core/Tensor.h>

#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/comm/interface/collective.h"
#include "lockstep/comm/interface/peer_memory_reducer.h"
#include "lockstep/comm/interface/pending.h"

namespace lockstep::comm {

/// What a transport can do; Group refuses the rest at the call, by name.
struct Capabilities {
  std::vector<CollectiveKind> kinds;
  std::vector<at::ScalarType> dtypes;
  std::vector<at::DeviceType> devices;
  /// What Collective::wire may be. Those that cross no host take all, and nothing is rounded.
  std::vector<at::ScalarType> wire_dtypes = {at::kFloat};
};

/// Every kind and dtype, of tensors on the CPU.
Capabilities full_cpu_capabilities(std::vector<at::ScalarType> wire_dtypes = {at::kFloat});

/// What a rank has called, as bytes that are the same on all ranks that called the same; for a transport that compares
/// it on the way.
struct SignatureView {
  const void* bytes = nullptr;
  std::size_t size = 0;              ///< the same for all calls, at most 256
  std::uint64_t key = 0;             ///< a hash of the call
  std::vector<char>* all = nullptr;  ///< where every rank's bytes go, by rank, when they are not all the same; lives as
                                     ///< long as the operation
};

/// One ordered stream of operations of a fixed set of ranks. All ranks start the same operations in the same order
/// (Group has compared them before). One thread calls start(); abort() may come from any.
class Transport {
 public:
  virtual ~Transport() = default;

  virtual std::string_view name() const = 0;
  virtual const Capabilities& capabilities() const = 0;

  /// Begins `op` and returns at once, or when it is done if that is quicker. The tensors must stay alive and untouched
  /// until the Pending is done. An error of the wire comes as the Pending's error, never from here.
  virtual PendingPtr start(const Collective& op) = 0;

  /// Like start(), for an operation whose calls the ranks have not compared: `call` goes along, and where the calls are
  /// not all the same, nothing but they moves and the Pending is done without error. May wait a little, as long as that
  /// is quicker than another way to wait. Null where a transport cannot do that: always, or never, for one call. A rank
  /// that starts an all_gather of its `call` instead, as operation of the same number, counts as one that calls
  /// something else.
  virtual PendingPtr start_checked(const Collective& op, const SignatureView& call) { return nullptr; }

  /// For parts like `parts` (their dtype and number of elements); all ranks call it, in the order of their operations,
  /// and it waits for them. Null where ranks do not reach each other's memory. It lives no longer than the transport.
  virtual std::unique_ptr<PeerMemoryReducer> make_in_place_reducer(const std::vector<at::Tensor>& parts) {
    return nullptr;
  }

  /// Ends everything that is pending with `cause` and whatever comes later too. Idempotent; does not wait.
  virtual void abort(std::exception_ptr cause) noexcept = 0;
};

}  // namespace lockstep::comm
