// The stack machine that a pickle is a program for.
#pragma once

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/torch_file/pickle.h"

namespace lockstep::checkpoint {

class PickleMachine {
 public:
  using Index = Pickle::Index;

  PickleMachine(std::string_view bytes, const std::string& file, std::uint64_t begin)
      : bytes_(bytes), file_(file), begin_(begin) {}

  /// Runs until STOP.
  Pickle run();

 private:
  [[noreturn]] void refuse(const std::string& reason) const;
  [[noreturn]] void refuse_without(const char* what) const;
  /// Memory that the program has asked for, all in all.
  void spend(std::size_t num_bytes);

  // Reading the program.
  std::string_view take(std::size_t num_bytes);
  std::string_view take_line();
  std::uint64_t take_number(std::size_t num_bytes);
  void step(unsigned char opcode);

  // The stack.
  void push(Index value);
  void make(Pickle::Value value);
  Index pop();
  Index top() const;
  std::size_t take_mark();

  // Opcodes.
  void make_number(std::size_t num_bytes);
  void make_long();
  void make_double();
  void make_string(std::size_t num_bytes);
  void make_tuple(std::size_t num_items);
  void fill(bool is_dict, std::size_t first);
  void find_global();
  void find_storage();
  void build();
  void remember(std::uint64_t key);
  void recall(std::uint64_t key);

  // Calls (pickle_calls.cc).
  void call();
  Pickle::Value encoded(const std::vector<Index>& arguments);
  Pickle::Value tensor(Pickle::Function function, const std::vector<Index>& arguments);
  Pickle::Value parameter(const std::vector<Index>& arguments);
  std::vector<std::int64_t> sizes(Index value, const char* what) const;
  void check_extent(const Pickle::Tensor& tensor, std::uint64_t num_elements) const;

  // Arguments, by their type.
  template <typename T>
  const T& as(Index value, const char* what) const {
    const T* const found = std::get_if<T>(&pickle_.values[value]);
    if (!found) refuse_without(what);
    return *found;
  }
  const Pickle::Container& items(Index value, Pickle::Kind kind, const char* what) const;

  const std::string_view bytes_;
  const std::string& file_;
  const std::uint64_t begin_;
  std::size_t at_ = 0;
  std::size_t here_ = 0;  // of the opcode
  std::uint64_t spent_ = 0;
  bool stopped_ = false;
  Pickle pickle_;
  std::vector<Index> stack_;
  std::vector<std::size_t> marks_;
  std::unordered_map<std::uint64_t, Index> memo_;
  std::unordered_map<std::string, std::uint32_t> storages_;  // by their keys
};

/// The rest of what parse_pickle() promises: depth, size, keys, and that every value is one that a tree may hold.
void check_tree(const Pickle& pickle, const std::string& file, std::uint64_t begin);

}  // namespace lockstep::checkpoint
