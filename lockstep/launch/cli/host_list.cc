#include "lockstep/launch/cli/host_list.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <optional>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"

namespace lockstep::launcher {
namespace {

constexpr std::size_t kMaxText = std::size_t{1} << 20;
constexpr std::size_t kMaxName = 253;  // of a host, RFC 1035
constexpr std::size_t kMaxPath = 4096;
constexpr std::size_t kMaxHosts = 4096;
constexpr int kMaxSlots = 4096;

bool is_word_char(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '-' || c == '.';
}

bool is_plain(std::string_view text) {
  return !text.empty() && text.size() <= kMaxName && text[0] != '-' &&
         std::all_of(text.begin(), text.end(), is_word_char);
}

/// Hexadecimal groups and colons, then perhaps %interface; the system reads it in the end.
bool is_ipv6(std::string_view text) {
  const std::string_view groups = text.substr(0, text.find('%'));
  const bool scoped = groups.size() < text.size();
  return text.size() <= kMaxName && std::count(groups.begin(), groups.end(), ':') >= 2 &&
         (!scoped || is_plain(text.substr(groups.size() + 1))) && std::all_of(groups.begin(), groups.end(), [](char c) {
           return std::isxdigit(static_cast<unsigned char>(c)) != 0 || c == ':' || c == '.';
         });
}

/// A path that a shell on the other host takes as one word, whichever shell it is.
bool is_path(std::string_view text) {
  return !text.empty() && text.size() <= kMaxPath && text[0] != '-' &&
         std::all_of(text.begin(), text.end(),
                     [](char c) { return is_word_char(c) || c == '/' || c == '+' || c == '@' || c == ','; });
}

bool is_interface(std::string_view text) {
  const auto allowed = [](char c) { return is_word_char(c) || c == ':' || c == '/' || c == '^'; };
  return !text.empty() && text.size() <= kMaxName && text[0] != '-' && std::all_of(text.begin(), text.end(), allowed);
}

/// A part of the text and where it stands in its line; knows how to complain.
struct Word {
  std::string_view text;
  std::size_t column = 1;  // of its first byte

  Word part(std::size_t begin, std::size_t size = std::string_view::npos) const {
    return {text.substr(begin, size), column + begin};
  }
};

/// What is wrong, thrown to whoever knows the name of the text and the line.
struct HostSyntaxError {
  std::size_t column;
  std::string message;
};

[[noreturn]] void fail_at(const Word& word, const std::string& message) { throw HostSyntaxError{word.column, message}; }

int parse_number(const Word& word, const char* what, int most) {
  const auto number = base::parse_int(word.text);
  if (!number || *number < 1 || *number > most)
    fail_at(word, std::string(what) + " is " + base::quoted(word.text, 80) + "; allowed is an integer from 1 to " +
                      std::to_string(most));
  return static_cast<int>(*number);
}

const char* const kAllowedNames =
    "; allowed are letters, digits, '.', '_' and '-', the first one no '-', or an IPv6 address in brackets";

/// name, name:slots, [v6], [v6]:slots or v6; what comes after the name in `rest`, from its colon.
std::string parse_name(const Word& word, Word& rest) {
  if (!word.text.empty() && word.text[0] == '[') {
    const std::size_t end = word.text.find(']');
    if (end == std::string_view::npos) fail_at(word, "'[' without ']'");
    const Word address = word.part(1, end - 1);
    if (!is_ipv6(address.text)) fail_at(address, "no IPv6 address: " + base::quoted(address.text, 80));
    rest = word.part(end + 1);
    if (!rest.text.empty() && rest.text[0] != ':')
      fail_at(rest, base::quoted(rest.text, 80) + " after ']'; allowed is :SLOTS");
    return std::string(address.text);
  }
  if (is_ipv6(word.text)) {
    rest = word.part(word.text.size());
    return std::string(word.text);
  }
  const std::size_t colon = std::min(word.text.find(':'), word.text.size());
  rest = word.part(colon);
  const Word name = word.part(0, colon);
  if (name.text.empty()) fail_at(name, "a host without a name" + std::string(kAllowedNames));
  if (!is_plain(name.text)) fail_at(name, "the host is " + base::quoted(name.text, 80) + kAllowedNames);
  return std::string(name.text);
}

Host parse_host(Word word) {
  Host host;
  if (const std::size_t at = word.text.find('@'); at != std::string_view::npos) {
    const Word user = word.part(0, at);
    if (!is_plain(user.text))
      fail_at(user, "the user is " + base::quoted(user.text, 80) +
                        "; allowed are letters, digits, '.', '_' and '-', the first one no '-'");
    host.user = user.text;
    word = word.part(at + 1);
  }
  Word rest;
  host.name = parse_name(word, rest);
  if (!rest.text.empty()) host.slots = parse_number(rest.part(1), "the number of slots", kMaxSlots);
  return host;
}

void set_option(Host& host, const Word& word) {
  const std::size_t equals = word.text.find('=');
  const std::string_view name = word.text.substr(0, equals);
  const Word value = equals == std::string_view::npos ? word.part(word.text.size()) : word.part(equals + 1);
  const auto text = [&](const char* what, bool allowed, const char* which, std::string& kept) {
    if (!allowed) fail_at(value, std::string(what) + " is " + base::quoted(value.text, 80) + "; allowed " + which);
    if (!kept.empty() && kept != value.text)
      fail_at(value, std::string(what) + " is " + base::quoted(value.text, 80) + " here and " + base::quoted(kept, 80) +
                         " before");
    kept = value.text;
  };
  if (name == "slots") {
    if (host.slots != 0) fail_at(word, "the number of slots is given twice");
    host.slots = parse_number(value, "the number of slots", kMaxSlots);
  } else if (name == "port") {
    host.port = parse_number(value, "the port", 65535);
  } else if (name == "user") {
    text("the user", is_plain(value.text), "are letters, digits, '.', '_' and '-', the first one no '-'", host.user);
  } else if (name == "path") {
    text("the path", is_path(value.text), "are letters, digits and any of / . _ - + @ , (the first one no '-')",
         host.remote_path);
  } else if (name == "interface") {
    text("the interface", is_interface(value.text),
         "is a name, or an address with the length of its prefix such as 10.0.0.0/8", host.interface);
  } else {
    fail_at(word,
            base::quoted(word.text, 80) + " is not known; allowed are slots=, port=, user=, path= and interface=");
  }
}

/// The list in the order of first mention; what is said twice of one host must agree, its slots add up.
class HostListBuilder {
 public:
  void add(const Host& host, const Word& word) {
    const auto [place, is_new] = index_.try_emplace(host.name, hosts_.size());
    if (is_new) {
      if (hosts_.size() == kMaxHosts) fail_at(word, "more than " + std::to_string(kMaxHosts) + " hosts");
      hosts_.push_back(host);
      return;
    }
    Host& known = hosts_[place->second];
    Host same = host;
    same.slots = known.slots;
    if (!(same == known))
      fail_at(word, "the host " + base::quoted(host.name, 80) +
                        " was named before with another user, port, path or interface");
    if ((host.slots == 0) != (known.slots == 0))
      fail_at(word, "the host " + base::quoted(host.name, 80) + " is named with slots and without");
    known.slots += host.slots;
    if (known.slots > kMaxSlots)
      fail_at(word, "the host " + base::quoted(host.name, 80) + " has " + std::to_string(known.slots) +
                        " slots; allowed are " + std::to_string(kMaxSlots));
  }
  std::vector<Host> take() { return std::move(hosts_); }
  bool empty() const { return hosts_.empty(); }

 private:
  std::vector<Host> hosts_;
  std::map<std::string, std::size_t> index_;
};

bool is_blank(char c) { return c == ' ' || c == '\t'; }

/// The next word of a line of a host file; nothing at its end or where a comment begins.
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
  Host host = parse_host(*first);
  while (const auto word = read_word(line, at)) set_option(host, *word);
  hosts.add(host, *first);
}

}  // namespace

std::vector<Host> parse_host_list(std::string_view text) try {
  if (text.size() > kMaxText) fail_at({text}, "longer than " + std::to_string(kMaxText) + " bytes");
  HostListBuilder hosts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const Word word = Word{text}.part(begin, end - begin);
    if (const std::size_t space = word.text.find_first_of(" \t\n"); space != std::string_view::npos)
      fail_at(word.part(space), "a space; hosts are separated by commas alone: -H alpha:4,beta:4");
    hosts.add(parse_host(word), word);
    begin = end + 1;
  }
  return hosts.take();
} catch (const HostSyntaxError& complaint) {
  throw base::UsageError("-H:1:" + std::to_string(complaint.column) + ": " + complaint.message);
}

std::vector<Host> parse_host_file(const std::string& name, std::string_view text) {
  std::size_t line_number = 1;
  try {
    if (text.size() > kMaxText) fail_at({text}, "longer than " + std::to_string(kMaxText) + " bytes");
    HostListBuilder hosts;
    for (std::size_t begin = 0; begin < text.size(); ++line_number) {
      const std::size_t end = std::min(text.find('\n', begin), text.size());
      add_line(hosts, text.substr(begin, end - begin));
      begin = end + 1;
    }
    if (hosts.empty()) fail_at({text}, "no host; allowed is a host a line: alpha:4, or alpha slots=4");
    return hosts.take();
  } catch (const HostSyntaxError& complaint) {
    throw base::FormatError(name + ":" + std::to_string(line_number) + ":" + std::to_string(complaint.column) + ": " +
                            complaint.message);
  }
}

std::string ssh_destination(const Host& host) { return host.user.empty() ? host.name : host.user + "@" + host.name; }

}  // namespace lockstep::launcher
