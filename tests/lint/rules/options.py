"""Every member of an options struct in lockstep/ has an initializer: g++ -Wextra then accepts designated initializers
that set only some members."""

import os
import sys

from source_tree import Finding

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../../../scripts"))

import cpp_text  # noqa: E402

SUFFIXES = ("Options", "Overrides", "Config")
NOT_A_MEMBER = ("using", "friend", "static", "struct", "class", "enum", "template", "operator", "(")


def check(tree):
    for path in tree.cpp("lockstep"):
        if path.endswith(".h"):
            yield from check_header(path, tree.text(path))


def check_header(path, text):
    code = cpp_text.tokens(text)
    for index, token in enumerate(code[:-1]):
        name = code[index + 1].text
        if token.text != "struct" or not name.endswith(SUFFIXES):
            continue
        begin = index + 2
        while begin < len(code) and code[begin].text not in ("{", ";", ")", ">", "&"):
            begin += 1
        if begin < len(code) and code[begin].text == "{":
            for member in members_without_initializer(code[begin + 1 : cpp_text.closing(code, begin)]):
                line = text.count("\n", 0, member.start) + 1
                yield Finding(path, line, f"{name}::{member.text} has no initializer")


def members_without_initializer(body):
    """Yields the names of the members that the tokens of a struct's body declare without an initializer."""
    index, statement = 0, []
    while index < len(body):
        word = body[index].text
        if word == ";":
            yield from declarators_without_initializer(statement)
            statement = []
        elif word in ("{", "("):
            statement.append(body[index])
            index = cpp_text.closing(body, index)
            if word == "{" and body[index + 1 : index + 2] and body[index + 1].text not in (";", ","):
                statement = []  # a function's body
        else:
            statement.append(body[index])
        index += 1


def declarators_without_initializer(statement):
    depth, last, has_initializer, is_first = 0, None, False, True
    for token in [*statement, None]:
        word = token.text if token else ","
        if is_first and depth == 0 and word in NOT_A_MEMBER:
            return
        if word == "," and depth == 0:
            if last is not None and not has_initializer:
                yield last
            has_initializer, is_first = False, False
        elif word in ("=", "{"):
            has_initializer = True
        elif not has_initializer:
            depth += (word == "<") - (word == ">")
            last = token


SAMPLE = {
    "lockstep/base/a.h": """\
#pragma once
struct Later;
void call(const struct ScanOptions& options);
struct RunOptions : HostOptions {
  int a = 1;
  int b; @flag
  std::string c; @flag
  std::map<int, std::string> d = {};
  std::function<void(int a, int b)> e; @flag
  std::function<void(int a, int b)> f = nullptr;
  std::string g = "", h{};
  bool i = true, j; @flag
  enum class Kind { kA, kB };
  using Names = std::vector<std::string>;
  static const int kLimit;
  Kind kind = Kind::kA;
  bool operator==(const RunOptions&) const = default;
  bool is_set() const { return a; }
  int k; @flag
};
struct Result {
  int x;
};
struct Optional {
  struct Options {
    int y; @flag
  };
};
""",
    "lockstep/base/a.cc": "struct LocalOptions {\n  int x;\n};\n",
}
