#include "lockstep/launch/cli/host_list.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <map>
#include <optional>

#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "lockstep/base/parse.h"

namespace lockstep::launcher::cli {
namespace {

constexpr std::size_t kMaxText = std::size_t{1} << 20;
constexpr std::size_t kMaxName = 253;  // of a host name, RFC 1035
constexpr std::size_t kMaxPath = 4096;
constexpr std::size_t kMaxHostsInList = 4096;
constexpr int kMaxSlots = 4096;

/// Returns whether `text` has 1 to `limit` letters, digits, '_', '-', '.' or characters of `others`, and no '-' first.
bool is_word(std::string_view text, std::size_t limit, std::string_view others) {
  return !text.empty() && text.size() <= limit && text[0] != '-' &&
         base::is_alnum_or(text, "_-." + std::string(others));
}

bool is_plain(std::string_view text) { return is_word(text, kMaxName, ""); }

/// Returns whether `text` consists of hexadecimal groups and colons, with an optional %interface. The system checks the
/// address when it is used.
bool is_ipv6(std::string_view text) {
  const std::string_view groups = text.substr(0, text.find('%'));
  const bool scoped = groups.size() < text.size();
  return text.size() <= kMaxName && std::ranges::count(groups, ':') >= 2 &&
         (!scoped || is_plain(text.substr(groups.size() + 1))) && std::ranges::all_of(groups, [](char c) {
           return std::isxdigit(static_cast<unsigned char>(c)) != 0 || c == ':' || c == '.';
         });
}

/// A part of the text, with its position for error messages.
struct Word {
  std::string_view text;
  std::size_t column = 1;  // of its first byte in its line

  Word part(std::size_t begin, std::size_t size = std::string_view::npos) const {
    return {text.substr(begin, size), column + begin};
  }
};

/// An error inside this file. parse_host_list() and parse_host_file() catch it and add the name of the text and the
/// line.
struct HostSyntaxError {
  std::size_t column;
  std::string message;
};

[[noreturn]] void fail_at(const Word& word, const std::string& message) { throw HostSyntaxError{word.column, message}; }

int parse_number(const Word& word, const char* what, int most) {
  const auto number = base::parse_int(word.text);
  if (!number || *number < 1 || *number > most)
    fail_at(word, std::string(what) + " is " + base::quoted(word.text, 80) + "; expected an integer from 1 to " +
                      std::to_string(most));
  return static_cast<int>(*number);
}

const char* const kExpectedName =
    "; expected letters, digits, '.', '_' and '-', not beginning with '-', or an IPv6 address in brackets";

/// Parses name, name:slots, [v6], [v6]:slots or v6. Stores the text after the name, from its colon, in `rest`.
std::string parse_name(const Word& word, Word& rest) {
  if (!word.text.empty() && word.text[0] == '[') {
    const std::size_t end = word.text.find(']');
    if (end == std::string_view::npos) fail_at(word, "'[' without ']'; expected [IPv6 address]");
    const Word address = word.part(1, end - 1);
    if (!is_ipv6(address.text))
      fail_at(address, "the address is " + base::quoted(address.text, 80) + "; expected an IPv6 address");
    rest = word.part(end + 1);
    if (!rest.text.empty() && rest.text[0] != ':')
      fail_at(rest, base::quoted(rest.text, 80) + " after ']'; expected :SLOTS");
    return std::string(address.text);
  }
  if (is_ipv6(word.text)) {
    rest = word.part(word.text.size());
    return std::string(word.text);
  }
  const std::size_t colon = std::min(word.text.find(':'), word.text.size());
  rest = word.part(colon);
  const Word name = word.part(0, colon);
  if (name.text.empty()) fail_at(name, "a host without a name" + std::string(kExpectedName));
  if (!is_plain(name.text)) fail_at(name, "the host is " + base::quoted(name.text, 80) + kExpectedName);
  return std::string(name.text);
}

HostSpec parse_host(Word word) {
  HostSpec host;
  if (const std::size_t at = word.text.find('@'); at != std::string_view::npos) {
    const Word user = word.part(0, at);
    if (!is_plain(user.text))
      fail_at(user, "the user is " + base::quoted(user.text, 80) +
                        "; expected letters, digits, '.', '_' and '-', not beginning with '-'");
    host.user = user.text;
    word = word.part(at + 1);
  }
  Word rest;
  host.name = parse_name(word, rest);
  if (!rest.text.empty()) host.slots = parse_number(rest.part(1), "the number of slots", kMaxSlots);
  return host;
}

void set_option(HostSpec& host, const Word& word) {
  const std::size_t equals = word.text.find('=');
  const std::string_view name = word.text.substr(0, equals);
  const Word value = equals == std::string_view::npos ? word.part(word.text.size()) : word.part(equals + 1);
  const auto text = [&](const char* what, bool valid, const char* expected, std::string& stored) {
    if (!valid) fail_at(value, std::string(what) + " is " + base::quoted(value.text, 80) + "; expected " + expected);
    if (!stored.empty() && stored != value.text)
      fail_at(value, std::string(what) + " is " + base::quoted(value.text, 80) + " here and " +
                         base::quoted(stored, 80) + " before; expected one value");
    stored = value.text;
  };
  if (name == "slots") {
    if (host.slots != 0) fail_at(word, "the number of slots is given twice; expected one number");
    host.slots = parse_number(value, "the number of slots", kMaxSlots);
  } else if (name == "port") {
    host.port = parse_number(value, "the port", 65535);
  } else if (name == "user") {
    text("the user", is_plain(value.text), "letters, digits, '.', '_' and '-', not beginning with '-'", host.user);
  } else if (name == "path") {
    // Any shell on the other host reads such a path as one word.
    text("the path", is_word(value.text, kMaxPath, "/+@,"),
         "letters, digits and any of / . _ - + @ , (not beginning with '-')", host.remote_path);
  } else if (name == "interface") {
    text("the interface", is_word(value.text, kMaxName, ":/^"),
         "a name, or a network with its prefix length, as in 10.0.0.0/8", host.interface);
  } else {
    fail_at(word,
            "unknown option " + base::quoted(word.text, 80) + "; expected slots=, port=, user=, path= or interface=");
  }
}

/// Collects the hosts in the order of their first entry. The entries of one host must agree; their slots are added.
class HostListBuilder {
 public:
  void add(const HostSpec& host, const Word& word) {
    const auto [place, is_new] = index_.try_emplace(host.name, hosts_.size());
    if (is_new) {
      if (hosts_.size() == kMaxHostsInList)
        fail_at(word, "more than " + std::to_string(kMaxHostsInList) + " hosts; expected at most that many");
      hosts_.push_back(host);
      return;
    }
    HostSpec& known = hosts_[place->second];
    HostSpec same = host;
    same.slots = known.slots;
    if (!(same == known))
      fail_at(word, "the host " + base::quoted(host.name, 80) +
                        " has another user, port, path or interface in an earlier entry; expected the same");
    if ((host.slots == 0) != (known.slots == 0))
      fail_at(word, "the host " + base::quoted(host.name, 80) +
                        " has slots in some entries only; expected slots in all or in none");
    known.slots += host.slots;
    if (known.slots > kMaxSlots)
      fail_at(word, "the host " + base::quoted(host.name, 80) + " has " + std::to_string(known.slots) +
                        " slots; expected at most " + std::to_string(kMaxSlots));
  }
  std::vector<HostSpec> take() { return std::move(hosts_); }
  bool empty() const { return hosts_.empty(); }

 private:
  std::vector<HostSpec> hosts_;
  std::map<std::string, std::size_t> index_;
};

bool is_blank(char c) { return c == ' ' || c == '\t'; }

/// Returns the next word of a line of a host file. Returns nullopt at a comment and at the end of the line.
std::optional<Word> read_word(std::string_view line, std::size_t& at) {
  while (at < line.size() && is_blank(line[at])) ++at;
  if (at == line.size() || line[at] == '#') return std::nullopt;
  const std::size_t begin = at;
  while (at < line.size() && !is_blank(line[at]) && line[at] != '#') ++at;
  return Word{line.substr(begin, at - begin), begin + 1};
}

void add_line(HostListBuilder& hosts, std::string_view line) {
  if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
  std::size_t at = 0;
  const auto first = read_word(line, at);
  if (!first) return;
  HostSpec host = parse_host(*first);
  while (const auto word = read_word(line, at)) set_option(host, *word);
  hosts.add(host, *first);
}

std::string read_text_file(const std::string& what, const std::string& file) {
  constexpr std::size_t kMaxBytes = std::size_t{1} << 20;
  const auto refuse = [&](const std::string& why) {
    throw base::UsageError(what + " is " + base::quoted(file, 256) + ": " + why + "; expected a text file");
  };
  const base::Fd fd(::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat info{};
  if (!fd || ::fstat(fd.get(), &info) != 0) refuse(std::strerror(errno));
  if (S_ISDIR(info.st_mode)) refuse("a directory");
  std::string text;
  char bytes[1 << 14];
  while (const ssize_t size = ::read(fd.get(), bytes, sizeof bytes)) {
    if (size < 0) refuse(std::strerror(errno));
    text.append(bytes, static_cast<std::size_t>(size));
    if (text.size() > kMaxBytes) refuse("longer than " + std::to_string(kMaxBytes) + " bytes");
  }
  return text;
}

}  // namespace

std::vector<HostSpec> parse_host_list(std::string_view text) try {
  if (text.size() > kMaxText)
    fail_at({text}, "longer than " + std::to_string(kMaxText) + " bytes; expected a shorter list");
  HostListBuilder hosts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const Word word = Word{text}.part(begin, end - begin);
    if (const std::size_t space = word.text.find_first_of(" \t\n"); space != std::string_view::npos)
      fail_at(word.part(space), "a space between hosts; expected a comma, as in -H alpha:4,beta:4");
    hosts.add(parse_host(word), word);
    begin = end + 1;
  }
  return hosts.take();
} catch (const HostSyntaxError& error) {
  throw base::UsageError("-H:1:" + std::to_string(error.column) + ": " + error.message);
}

std::vector<HostSpec> parse_host_file(const std::string& name, std::string_view text) {
  std::size_t line_number = 1;
  try {
    if (text.size() > kMaxText)
      fail_at({text}, "longer than " + std::to_string(kMaxText) + " bytes; expected a shorter list");
    HostListBuilder hosts;
    for (std::size_t begin = 0; begin < text.size(); ++line_number) {
      const std::size_t end = std::min(text.find('\n', begin), text.size());
      add_line(hosts, text.substr(begin, end - begin));
      begin = end + 1;
    }
    if (hosts.empty()) fail_at({text}, "no host; expected one host per line, as in alpha:4 or alpha slots=4");
    return hosts.take();
  } catch (const HostSyntaxError& error) {
    throw base::FormatError(name + ":" + std::to_string(line_number) + ":" + std::to_string(error.column) + ": " +
                            error.message);
  }
}

std::string ssh_destination(const HostSpec& host) {
  return host.user.empty() ? host.name : host.user + "@" + host.name;
}

std::vector<HostSpec> read_host_file(const std::string& what, const std::string& file) {
  return parse_host_file(file, read_text_file(what, file));
}

}  // namespace lockstep::launcher::cli
