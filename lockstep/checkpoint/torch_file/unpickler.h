// The stack machine that executes a pickle's opcodes.
#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "lockstep/checkpoint/torch_file/pickle.h"

namespace lockstep::checkpoint::inline torch_file {

class Unpickler {
 public:
  using Index = Pickle::Index;

  Unpickler(std::string_view bytes, const std::string& file, std::uint64_t begin)
      : bytes_(bytes), file_(file), begin_(begin) {}

  /// Executes the pickle until the opcode STOP.
  Pickle run();

 private:
  [[noreturn]] void throw_format_error(const std::string& reason) const;
  [[noreturn]] void throw_expected(const char* what) const;
  /// Counts memory that the pickle requests; throws FormatError above the limit.
  void charge(std::size_t num_bytes);

  // Reading opcodes.
  std::string_view read_bytes(std::size_t num_bytes);
  std::string_view read_line();
  std::uint64_t read_uint(std::size_t num_bytes);
  void execute(unsigned char opcode);

  // The stack.
  void push(Index value);
  void push_value(Pickle::Value value);
  Index pop();
  Index top() const;
  std::size_t pop_mark();

  // Opcodes.
  void push_int(std::size_t num_bytes);
  void push_long();
  void push_float();
  void push_string(std::size_t num_bytes);
  void push_tuple(std::size_t num_items);
  void append_items(bool is_dict, std::size_t first);
  void push_global();
  void push_storage();
  void push_module();
  void build();
  void memo_put(std::uint64_t key);
  void memo_get(std::uint64_t key);

  // Function calls. They are not executed: each only records the value that it would return.
  void reduce();
  Pickle::Value encode_latin1(const std::vector<Index>& arguments);
  Pickle::Value rebuild_tensor(Pickle::Callable function, const std::vector<Index>& arguments);
  Pickle::Value rebuild_parameter(const std::vector<Index>& arguments);
  std::vector<std::int64_t> as_sizes(Index value, const char* what) const;
  void check_extent(const Pickle::Tensor& tensor, std::uint64_t num_elements) const;

  // Typed access to arguments.
  template <typename T>
  const T& as(Index value, const char* what) const {
    const T* const found = std::get_if<T>(&pickle_.values[value]);
    if (!found) throw_expected(what);
    return *found;
  }
  const Pickle::Container& as_items(Index value, Pickle::Kind kind, const char* what) const;

  const std::string_view bytes_;
  const std::string& file_;
  const std::uint64_t begin_;
  std::size_t position_ = 0;
  std::size_t opcode_offset_ = 0;  // offset of the current opcode
  std::uint64_t num_charged_bytes_ = 0;
  bool is_stopped_ = false;
  Pickle pickle_;
  std::vector<Index> stack_;
  std::vector<std::size_t> marks_;
  std::unordered_map<std::uint64_t, Index> memo_;
  std::unordered_map<std::string, std::uint32_t> storages_;  // by storage key
};

/// Checks the properties that the Unpickler does not check: depth, size, keys, and that every value may occur in a
/// tree. Throws FormatError.
void validate_pickle(const Pickle& pickle, const std::string& file, std::uint64_t begin);

}  // namespace lockstep::checkpoint::inline torch_file
