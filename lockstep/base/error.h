// The errors that a caller may handle. Broken invariants do not come this way: see check.h.
#pragma once

#include <stdexcept>
#include <string>

#include "lockstep/base/cause.h"

namespace lockstep::base {

/// The root of every error that Lockstep throws. what() is one line: the operation, the rank and peer where there are
/// any, the value got and the values allowed. cause() is its class in the table of cause.h. The launcher's FATAL line
/// carries a CommError, and what init() throws, because those are published in the store; of others it knows the rank's
/// exit code only.
class Error : public std::runtime_error {
 public:
  Error(Cause cause, const std::string& message, std::string hint = {})
      : std::runtime_error(message), cause_(cause), hint_(std::move(hint)) {}

  Cause cause() const { return cause_; }
  /// What the user can do about it; empty when what() says all.
  const std::string& hint() const { return hint_; }

 private:
  Cause cause_;
  std::string hint_;
};

/// A call, option, argument or variable that is not allowed. Nothing was changed.
class UsageError : public Error {
 public:
  explicit UsageError(const std::string& message, std::string hint = {}, Cause cause = Cause::kBadArg)
      : Error(cause, message, std::move(hint)) {}
};

/// Bytes of a file that break its format. what() starts with "FILE:OFFSET: " or "FILE:LINE:COLUMN: ".
class FormatError : public Error {
 public:
  explicit FormatError(const std::string& message) : Error(Cause::kBadFile, message) {}
};

/// The operating system refused something. what() ends with the text of errno.
class SystemError : public Error {
 public:
  SystemError(const std::string& message, int error_number, Cause cause = Cause::kResource);
  int error_number() const { return error_number_; }

 private:
  int error_number_;
};

/// An operation between ranks failed. After it the group is closed: every later call on it throws the same error.
class CommError : public Error {
 public:
  /// `op` as in a FATAL line, "all_reduce(fc.weight)#12"; `rank` is the caller, `peer` the rank at fault, -1 if
  /// unknown.
  CommError(Cause cause, std::string op, int rank, int peer, const std::string& message, std::string hint = {})
      : Error(cause, message, std::move(hint)), op_(std::move(op)), rank_(rank), peer_(peer) {}

  const std::string& op() const { return op_; }
  int rank() const { return rank_; }
  int peer() const { return peer_; }

 private:
  std::string op_;
  int rank_;
  int peer_;
};

/// Ranks made different calls. what() names both ranks and both calls.
class DesyncError : public CommError {
 public:
  using CommError::CommError;
};

/// An operation did not finish before its deadline.
class TimeoutError : public CommError {
 public:
  using CommError::CommError;
};

/// The connection to a peer ended: it died, left, or the network failed.
class PeerLostError : public CommError {
 public:
  using CommError::CommError;
};

}  // namespace lockstep::base
