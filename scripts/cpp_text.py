"""Splits C++ into tokens, and finds functions, classes and pieces of code in it, without a parser for the language."""

import re
from typing import NamedTuple


class Token(NamedTuple):
    text: str
    start: int
    end: int


_TOKEN = re.compile(
    r"(?P<skip>\s+|\\\n|//(?:[^\n\\]|\\.|\\\n)*|/\*.*?\*/)"
    r'|(?P<raw>(?:u8|[uUL])?R"(?P<delimiter>[^(\s]*)\(.*?\)(?P=delimiter)")'
    r'|(?P<string>(?:u8|[uUL])?"(?:\\.|[^"\\\n])*")'
    r"|(?P<number>\.?[0-9](?:'?[0-9A-Za-z_.]|(?<=[eEpP])[+-])*)"
    r"|(?P<character>(?:u8|[uUL])?'(?:\\.|[^'\\\n])+')"
    r"|(?P<word>[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<other>.)",
    re.S,
)
_STRING = re.compile(r'"(?:\\.|[^"\\\n])*"')


def tokens(text):
    """Returns the tokens of `text`, without comments and white space. Joins adjacent literals: "a" "b" is "ab"."""
    found = []
    after_string = False
    for match in _TOKEN.finditer(text):
        if match.lastgroup == "skip":
            continue
        is_string = _STRING.fullmatch(match.group()) is not None
        if is_string and after_string:
            found[-1] = Token(found[-1].text[:-1] + match.group()[1:], found[-1].start, match.end())
        else:
            found.append(Token(match.group(), match.start(), match.end()))
        after_string = is_string
    return found


_CLOSING = {"(": ")", "{": "}", "[": "]"}


def closing(code, opening):
    """Returns the index of the bracket that closes the one at index `opening`, or None."""
    pair = code[opening].text, _CLOSING[code[opening].text]
    depth = 0
    for index in range(opening, len(code)):
        if code[index].text == pair[0]:
            depth += 1
        elif code[index].text == pair[1]:
            depth -= 1
            if depth == 0:
                return index
    return None


def _after_initializers(code, index):
    """Returns the index after a constructor's initializers, which begin at `index`, after the colon; or None."""
    while index < len(code):
        while index < len(code) and code[index].text not in "({":
            index += 1
        end = closing(code, index) if index < len(code) else None
        if end is None:
            return None
        index = end + 1
        if index < len(code) and code[index].text == ".":
            while index < len(code) and code[index].text == ".":
                index += 1
        if index >= len(code) or code[index].text != ",":
            return index
        index += 1
    return None


def _body(code, index):
    """Returns the index of the brace that opens the body of the function whose parameters end before `index`, or
    None."""
    if index < len(code) and code[index].text == ":" and (index + 1 == len(code) or code[index + 1].text != ":"):
        index = _after_initializers(code, index + 1)
        if index is None:
            return None
    in_type = False
    while index < len(code):
        text = code[index].text
        if text == "{":
            return index
        if text == "-" and index + 1 < len(code) and code[index + 1].text == ">":
            in_type = True
        elif (
            not in_type
            and text not in ("const", "noexcept", "override", "final", "&", ">", "try", "mutable")
            or text == ";"
        ):
            return None
        index += 1
    return None


def _bodies(code, words, first, last):
    """Yields the index ranges, from name to closing brace, of the functions in code[first:last] whose name is the
    tokens `words`."""
    for begin in range(first, last - len(words)):
        if [token.text for token in code[begin : begin + len(words)]] != words:
            continue
        opening = begin + len(words)
        if code[opening].text != "(":
            continue
        end = closing(code, opening)
        brace = _body(code, end + 1) if end is not None else None
        close = closing(code, brace) if brace is not None else None
        if close is not None:
            yield begin, close + 1


def _classes(code, name, first, last):
    """Yields the index ranges of the classes, structs, unions, enums and namespaces called `name` in
    code[first:last]."""
    for begin in range(first, last - 1):
        if code[begin].text not in ("class", "struct", "union", "enum", "namespace"):
            continue
        index, named = begin + 1, False
        while index < last and code[index].text not in ("{", ";", "(", ")", "=", ","):
            named = named or code[index].text == name
            index += 1
        if named and index < last and code[index].text == "{":
            close = closing(code, index)
            if close is not None:
                yield begin, close + 1


def scopes(code, name):
    """Returns the index ranges in the tokens `code` that `name` names: all overloads of a function ("draw",
    "Progress::draw"), or a class."""
    words = [token.text for token in tokens(name)]
    found = list(_bodies(code, words, 0, len(code)))
    parts = name.split("::")
    if not found and len(parts) > 1:
        outer = [(0, len(code))]
        for part in parts[:-1]:
            outer = [inner for scope in outer for inner in _classes(code, part, *scope)]
        last = [token.text for token in tokens(parts[-1])]
        found = [inner for scope in outer for inner in _bodies(code, last, *scope)]
        if not found:
            found = [inner for scope in outer for inner in _classes(code, parts[-1], *scope)]
    if not found and len(parts) == 1:
        found = list(_classes(code, name, 0, len(code)))
    return found


def _matches_in_strings(text, code, ranges, piece):
    """Yields the same as matches() for a part of a string literal. Joins a literal that the source splits."""
    for first, last in ranges:
        for token in code[first:last]:
            if not token.text.startswith('"'):
                continue
            places = [
                place
                for literal in _TOKEN.finditer(text, token.start, token.end)
                if literal.lastgroup == "string"
                for place in range(literal.start() + 1, literal.end() - 1)
            ]
            content = "".join(text[place] for place in places)
            for found in re.finditer(re.escape(piece), content):
                yield places[found.start()], places[found.end() - 1] + 1


def matches(text, piece, scope="", in_string=False):
    """Returns the character ranges of `text` that equal the code `piece`, ignoring white space, line breaks and
    comments. If `scope` names a function or class, searches only that. With in_string, `piece` is a part of a string
    literal and must match exactly."""
    code = tokens(text)
    wanted = [token.text for token in tokens(piece)]
    ranges = scopes(code, scope) if scope else [(0, len(code))]
    if in_string:
        return sorted(set(_matches_in_strings(text, code, ranges, piece)))
    found = set()
    for first, last in ranges:
        for begin in range(first, last - len(wanted) + 1):
            if all(code[begin + k].text == wanted[k] for k in range(len(wanted))):
                found.add((code[begin].start, code[begin + len(wanted) - 1].end))
    return sorted(found)
