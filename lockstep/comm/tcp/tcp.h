// The TCP transport: for tensors on the CPU, between processes on one host or several.
#pragma once

#include <memory>

#include "lockstep/comm/interface/transport.h"
#include "lockstep/comm/tcp/mesh.h"

namespace lockstep::comm::tcp {

/// Connects all ranks, as connect_mesh() describes; blocks until all of them have called it. Either a thread of the
/// transport sends and receives, or the threads that wait for operations do (TcpOptions::has_thread); none of these may
/// begin to wait while the transport is destroyed. start() itself sends and receives what it can of an operation of up
/// to 64 KiB if no other one is incomplete. Collectives start to send in the order in which they were started, and then
/// proceed independently of each other; sends and receives have connections of their own, and a send is done when it
/// has been received. When the connection to a rank ends, all collectives fail, and so do sends to it and receives from
/// it.
std::shared_ptr<Transport> make_tcp_transport(const TcpOptions& options);

}  // namespace lockstep::comm::tcp
