"""Words that were private metaphors do not return: as identifiers anywhere, and some of them in prose as well.

A word counts where it is a whole word of a snake_case or CamelCase name: `door_fd` and `FrontDoor`, but not `outdoors`.
"""

import io
import os
import re
import sys
import tokenize

from source_tree import Finding

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../../../scripts"))

import cpp_text  # noqa: E402

# Words without an ordinary meaning in this project, in the forms in which they occurred; flagged in prose as well.
IN_PROSE = """cargo cargoes house houses keeper keepers knock knocked knocking knocks meeting meetings patient patients
room rooms seam seams undertaking undertakings ward wards witness witnesses"""
IN_IDENTIFIERS = """bed beds board boards company companies door doors lane lanes neighbor neighbors neighbour
neighbours patience pulse pulses wish wishes"""
# Words with an ordinary meaning: lines of text, columns of a table, drivers of GPUs, std::floor, lifetimes. Names of
# four words or more (those of tests are sentences) may contain them; shorter identifiers, if they are listed here.
ORDINARY_WORDS = "cell cells column columns driver drivers floor floors letter letters life line lines lives"
ORDINARY = """
AddsColumns COLUMN COLUMNS ColumnLimit MAX_COLUMNS TerminalColumns add_columns clip_to_columns column column_index
columns columns_left columns_of kDescriptionColumn kMaxColumns kMaxCommentColumn terminal_columns
DriverTooOld check_driver cudaDriverGetVersion driver driver_broken driver_cuda driver_too_old driver_version
kDriverErrors min_driver_for old_driver
CommandLine CommandLineOptions FatalLine FormatProgressLine LINE LINES LineSegment LineSplitter Lines RejectsOtherLines
ReportLine WholeLinesOnly WindowsLineEndings __LINE__ add_line cache_line code_lines command_line elements_per_line
first_line first_lines format_progress_line join_lines json_line json_lines kMaxLine kTailLines keep_last_line
keep_lines last_line line line_chart line_interval line_number line_prefix line_rate lines lines_of new_line num_lines
output_lines parse_command_line print_line print_many_lines printable_lines read_line rewrite_lines run_line
sorted_lines table_line to_one_line write_line
floor letter letters
"""
# Terms of PyTorch and Python.
TERMS = "cell_contents TensorBoard TensorBoardLogger line_search_fn patience"
EXCEPT = ("CHANGELOG.md", "docs/history/", "tests/lint/rules/retired_words.py", "tests/fuzz/corpus/")

CPP = (".h", ".cc", ".c")
HASH_COMMENTS = (".cmake", ".cmake.in", "CMakeLists.txt", ".sh", ".toml", "Makefile", ".ci/run")
PROSE = (".md", ".txt")

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
HASH_COMMENT = re.compile(r"(?m)(?:^|(?<=\s))#[^\n]*")
MIN_WORDS_OF_SENTENCE = 4

in_prose = set(IN_PROSE.split())
in_paths = in_prose | set(IN_IDENTIFIERS.split())
in_identifiers = in_paths | set(ORDINARY_WORDS.split())
allowed = set(ORDINARY.split()) | set(TERMS.split())


def check(tree):
    for path in tree.paths(ends=(*CPP, ".py", *HASH_COMMENTS, *PROSE)):
        if path.startswith(EXCEPT):
            continue
        text = tree.text(path)
        found = {(1, word, path) for name in NAME.findall(path) for word in words(name) if word in in_paths}
        for line, name in identifiers(path, text):
            found |= {(line, word, name) for word in retired_in(name)}
        for match in NAME.finditer(text):
            if any(word in in_prose for word in words(match.group())):
                line = text.count("\n", 0, match.start()) + 1
                found |= {(line, word, match.group()) for word in words(match.group()) if word in in_prose}
        for line, word, name in sorted(found):
            hint = "use a standard term" + (" (or see ORDINARY in the rule)" if word not in in_paths else "")
            yield Finding(path, line, f"'{word}' in '{name}' is a retired word; {hint}")


def words(name):
    return [word.lower() for word in WORD.findall(name)]


def retired_in(name):
    """Returns the retired words in an identifier."""
    if name in allowed or name.rstrip("_") in allowed:
        return []
    parts = words(name)
    forbidden = in_identifiers if len(parts) < MIN_WORDS_OF_SENTENCE else in_paths
    return [word for word in parts if word in forbidden]


def identifiers(path, text):
    """Yields the line number and the name of each identifier that has a retired word. Skips comments and strings."""
    if path.endswith(".py"):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME and retired_in(token.string):
                yield token.start[0], token.string
        return
    if path.endswith(CPP):
        names = [(token.start, token.text) for token in cpp_text.tokens(text) if NAME.fullmatch(token.text)]
    elif path.endswith(HASH_COMMENTS):
        text = HASH_COMMENT.sub("", text)
        names = [(match.start(), match.group()) for match in NAME.finditer(text)]
    else:
        names = []
    for start, name in names:
        if retired_in(name):
            yield text.count("\n", 0, start) + 1, name


SAMPLE = {
    "lockstep/base/a.cc": """\
// The driver is on the floor next door, and each line has a letter.
#include "lockstep/comm/door.h"
int door_fd = 3; @flag
class FrontDoor {}; @flag
const char* key = "shm/door/0";
int outdoors, backward, forward, keyboard, sideways;
// A patient thread. @flag
const char* text = "there is no room left"; @flag
std::string line, line_;
class Line {}; @flag
TEST(Output, LastLineWithoutNewlineIsShown) {}
TEST(Output, TheCellsOfAMeetingAreLanes) {} @flag
TensorBoardLogger board; @flag
int kBoardSize; @flag
options.patience(3);
int spin_patience; @flag
""",
    "lockstep/comm/door.cc": "int x; @flag\n",
    "scripts/a.py": """\
# a wish, a pulse
wish = 1 @flag
print("a company of neighbours")
print("witnesses") @flag
lines = [line for line in text]
lane_lines = lines @flag
""",
    "scripts/a.sh": "# the lane\nlane=1 @flag\necho line  # a door\necho $neighbours @flag\n",
    "CMakeLists.txt": "# a board\nset(rooms a b) @flag\nset(driver a b)\n",
    "tests/mutations/base.toml": "# a board\nold = 'board'  # @flag\nold = 'keyboard'\n",
    "docs/a.md": "the lane of a board\nthe house and its rooms @flag\n`GradientWitness` @flag\na warden\n",
    "docs/history/a.md": "the house\n",
    "CHANGELOG.md": "the house\n",
}
