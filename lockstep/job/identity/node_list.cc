#include "lockstep/job/identity/node_list.h"

#include <algorithm>
#include <cctype>
#include <cstdint>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"

namespace lockstep::job::identity {
namespace {

constexpr std::size_t kMaxName = 255;
constexpr std::size_t kMaxDigits = 18;  // fits into 64 bits
constexpr std::int64_t kMaxCount = 1 << 20;
constexpr const char* kHostsFormat = "host names and ranges, such as h[1-3,07-09],x5";
constexpr const char* kCountsFormat = "counts, such as 2(x2),1";

/// Parses a text from left to right. Its errors name the variable, the text, the column and the expected format.
class ListParser {
 public:
  ListParser(std::string_view what, std::string_view text, const char* format)
      : what_(what), text_(text), format_(format) {}

  [[noreturn]] void fail(const std::string& why) const { fail(why, at_); }
  [[noreturn]] void fail(const std::string& why, std::size_t position) const {
    throw base::UsageError(std::string(what_) + " is " + base::quoted(text_, 80) + ": " + why + " at column " +
                           std::to_string(position + 1) + "; expected " + format_);
  }
  std::size_t position() const { return at_; }
  bool at_end() const { return at_ == text_.size(); }
  bool next_is(char c) const { return !at_end() && text_[at_] == c; }
  bool take(char c) {
    if (!next_is(c)) return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!take(c)) fail(std::string("'") + c + "' is missing");
  }
  /// Takes all characters that `allowed` accepts. Fails unless they are 1 to `limit`.
  template <typename Allowed>
  std::string_view take_while(const char* name, std::size_t limit, Allowed allowed) {
    const std::size_t begin = at_;
    while (!at_end() && allowed(static_cast<unsigned char>(text_[at_]))) ++at_;
    if (at_ == begin) fail(std::string(name) + " is missing");
    if (at_ - begin > limit) fail(std::string(name) + " is too long");
    return text_.substr(begin, at_ - begin);
  }
  std::string_view digits() {
    return take_while("a number", kMaxDigits, [](unsigned char c) { return std::isdigit(c) != 0; });
  }
  std::int64_t number(std::int64_t low, std::int64_t high) {
    const std::size_t begin = at_;
    const std::int64_t value = base::parse_int(digits()).value_or(-1);
    if (value < low || value > high)
      fail("a number is outside " + std::to_string(low) + " to " + std::to_string(high), begin);
    return value;
  }
  void check_count(std::uint64_t entries) const {
    if (entries > kMaxNodes) fail("there are more than " + std::to_string(kMaxNodes) + " entries");
  }

 private:
  std::string_view what_;
  std::string_view text_;
  const char* format_;
  std::size_t at_ = 0;
};

bool is_name_char(unsigned char c) { return (c < 0x80 && std::isalnum(c)) || c == '-' || c == '_' || c == '.'; }

std::string padded(std::int64_t number, std::size_t width) {
  std::string text = std::to_string(number);
  if (text.size() < width) text.insert(0, width - text.size(), '0');
  return text;
}

/// Parses the content of a bracket, "1-3,07-09]", into texts. The caller combines them with `names` names; the number
/// of combinations is checked.
std::vector<std::string> parse_bracket(ListParser& in, std::size_t names) {
  std::vector<std::string> numbers;
  do {
    const std::size_t begin = in.position();
    const std::string_view first_text = in.digits();
    const std::int64_t first = base::parse_int(first_text).value_or(0);
    const std::int64_t last = in.take('-') ? base::parse_int(in.digits()).value_or(0) : first;
    if (last < first) in.fail("a range is descending", begin);
    const auto more = static_cast<std::uint64_t>(last - first) + 1;
    in.check_count(more);
    in.check_count((numbers.size() + more) * names);
    for (std::int64_t number = first; number <= last; ++number) numbers.push_back(padded(number, first_text.size()));
  } while (in.take(','));
  in.expect(']');
  return numbers;
}

/// Returns each name with each suffix appended; the suffixes vary fastest.
std::vector<std::string> cartesian_product(const std::vector<std::string>& names,
                                           const std::vector<std::string>& suffixes) {
  std::vector<std::string> result;
  for (const std::string& name : names)
    for (const std::string& suffix : suffixes) result.push_back(name + suffix);
  return result;
}

/// Parses one name with its brackets into hosts. `before` is the number of hosts parsed so far.
std::vector<std::string> parse_name(ListParser& in, std::size_t before) {
  std::vector<std::string> names = {""};
  if (in.next_is('-')) in.fail("a name starts with '-'");
  do {
    if (in.take('['))
      names = cartesian_product(names, parse_bracket(in, names.size()));
    else
      names = cartesian_product(names, {std::string(in.take_while("a name", kMaxName, is_name_char))});
    if (std::ranges::any_of(names, [](const std::string& name) { return name.size() > kMaxName; }))
      in.fail("a name is too long");
  } while (!in.at_end() && !in.next_is(','));
  in.check_count(before + names.size());
  return names;
}

}  // namespace

std::vector<std::string> expand_hosts(std::string_view what, std::string_view list) {
  ListParser in(what, list, kHostsFormat);
  std::vector<std::string> hosts;
  do {
    for (std::string& name : parse_name(in, hosts.size())) hosts.push_back(std::move(name));
  } while (in.take(','));
  return hosts;
}

std::vector<int> expand_counts(std::string_view what, std::string_view text) {
  ListParser in(what, text, kCountsFormat);
  std::vector<int> counts;
  do {
    const auto count = static_cast<int>(in.number(0, kMaxCount));
    std::size_t times = 1;
    if (in.take('(')) {
      in.expect('x');
      times = static_cast<std::size_t>(in.number(1, kMaxNodes));
      in.expect(')');
    }
    in.check_count(counts.size() + times);
    counts.insert(counts.end(), times, count);
  } while (in.take(','));
  if (!in.at_end()) in.fail("invalid count");
  return counts;
}

}  // namespace lockstep::job::identity
