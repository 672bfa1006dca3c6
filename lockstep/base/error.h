// The exceptions that a caller may handle. Violated invariants abort instead: see check.h.
#pragma once

#include <exception>
#include <stdexcept>
#include <string>

#include "lockstep/base/cause.h"

namespace lockstep::base {

/// The base class of every exception that Lockstep throws. what() is one line: the operation, the rank and the peer if
/// there are any, the value received and the values expected. Ranks publish CommErrors, all errors that init() throws,
/// and those that end a program, in the store. The launcher prints the first of them in its FATAL line.
class Error : public std::runtime_error {
 public:
  Error(Cause cause, const std::string& message, const std::string& hint = {});

  Cause cause() const { return cause_; }
  /// The remedy for the user; empty if what() already states it.
  const std::string& hint() const { return hint_; }

 private:
  Cause cause_;
  std::string hint_;
};

/// For programs in other languages: what() and hint() of every Error are what `rename` returns for those of C++, which
/// name classes, functions and options. To be called before any is thrown.
void rename_in_errors(std::string (*rename)(const std::string& text));

/// An invalid call, option, argument or environment variable. Nothing was changed.
class UsageError : public Error {
 public:
  explicit UsageError(const std::string& message, std::string hint = {}, Cause cause = Cause::kBadArg)
      : Error(cause, message, std::move(hint)) {}
};

/// Throws UsageError("`owner`: `option` is `value`; expected `expected`") unless `good`.
void check_option(bool good, const std::string& owner, const std::string& option, double value,
                  const std::string& expected);

/// A file violates its format. what() starts with "FILE:OFFSET: " or "FILE:LINE:COLUMN: ".
class FormatError : public Error {
 public:
  explicit FormatError(const std::string& message) : Error(Cause::kBadFile, message) {}
};

/// A system call failed. what() ends with the text of errno.
class SystemError : public Error {
 public:
  SystemError(const std::string& message, int error_number, Cause cause = Cause::kResource,
              const std::string& hint = {});
  int error_number() const { return error_number_; }

 private:
  int error_number_;
};

/// An operation between ranks failed. The group is closed afterwards: every later call on it throws the same error.
/// One that is thrown while another exception is handled, such as by a barrier in a catch block, remembers that one,
/// because it has led to the failure: other ranks make no call there.
class CommError : public Error {
 public:
  /// `op` is the operation as in a FATAL line, "all_reduce(fc.weight)#12". `rank` is the caller and `peer` is the rank
  /// at fault; each is -1 if unknown.
  CommError(Cause cause, std::string op, int rank, int peer, const std::string& message, std::string hint = {})
      : Error(cause, message, std::move(hint)), op_(std::move(op)), rank_(rank), peer_(peer) {}

  const std::string& op() const { return op_; }
  int rank() const { return rank_; }
  int peer() const { return peer_; }
  /// The exception that the calling thread was handling; null if there was none.
  const std::exception_ptr& while_handling() const { return while_handling_; }
  /// Throws a copy of the most derived class.
  [[noreturn]] virtual void rethrow() const { throw *this; }

 private:
  std::exception_ptr while_handling_ = std::current_exception();
  std::string op_;
  int rank_;
  int peer_;
};

/// Ranks made different calls. what() names both ranks and both calls.
class DesyncError : public CommError {
 public:
  using CommError::CommError;
  [[noreturn]] void rethrow() const override { throw *this; }
};

/// An operation did not finish before its deadline.
class TimeoutError : public CommError {
 public:
  using CommError::CommError;
  [[noreturn]] void rethrow() const override { throw *this; }
};

/// The connection to a peer ended: the peer died or left, or the network failed.
class PeerLostError : public CommError {
 public:
  using CommError::CommError;
  [[noreturn]] void rethrow() const override { throw *this; }
};

}  // namespace lockstep::base
