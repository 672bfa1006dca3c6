#!/usr/bin/env python3
"""Compares the help texts of the program lockstep with the files in cli/, so that they change only on purpose. Compares
these files with the options in programs/completion/lockstep.bash and in docs/reference/options.md, and with
programs/man/lockstep.1, which has their texts.

cli_surface.py --bin DIR          runs the command in the first line of each file ("$ lockstep run --help") and compares
cli_surface.py --bin DIR --write  writes the program's output into the files, and the man page
"""

import argparse
import difflib
import os
import re
import subprocess
import sys

CLI = os.path.join(os.path.dirname(os.path.abspath(__file__)), "cli")
ROOT = os.path.join(CLI, "..", "..", "..")
COMPLETION = os.path.join(ROOT, "programs", "completion", "lockstep.bash")
MAN_PAGE = os.path.join(ROOT, "programs", "man", "lockstep.1")
REFERENCE = os.path.join(ROOT, "docs", "reference", "options.md")
UNLISTED = {("run", "-np")}  # mentioned in the text of -n


def help_text(bin_dir, command):
    program, *arguments = command.split()
    done = subprocess.run(
        [os.path.join(bin_dir, program), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=20,
        env={**os.environ, "COLUMNS": "100"},
    )
    if done.returncode != 0 or done.stderr:
        sys.exit(
            f"cli: {command} exited with {done.returncode} and printed to stderr: {done.stderr.strip() or 'nothing'}"
        )
    return done.stdout


def verbs(top_help):
    """Returns the first words of the indented lines below a heading that names commands or verbs."""
    found, inside = [], False
    for line in top_help.splitlines():
        if not line.startswith(" "):
            inside = bool(re.match(r"(?i)(?:commands|verbs|subcommands)\b", line))
        match = re.match(r"  (?:lockstep )?([a-z][\w-]*)(?:\s|$)", line)
        if inside and match:
            found.append(match.group(1))
    return found


def check(bin_dir, write):
    good = True
    for name in sorted(os.listdir(CLI)):
        path = os.path.join(CLI, name)
        with open(path) as file:
            frozen = file.read()
        command = frozen.splitlines()[0].removeprefix("$ ")
        now = f"$ {command}\n{help_text(bin_dir, command)}"
        if now == frozen:
            continue
        if write:
            with open(path, "w") as file:
                file.write(now)
            continue
        good = False
        sys.stdout.writelines(
            difflib.unified_diff(frozen.splitlines(True), now.splitlines(True), f"tests/lint/cli/{name}", command)
        )
    return all([check_verbs(bin_dir), check_completion(), check_reference(), check_man_page(write), good])


def listed_options(help_text):
    """Returns the options of a help text: {name: (whether a value follows, the option's text)}."""
    options, names = {}, []
    for line in help_text.splitlines():
        match = re.match(r"  (-[^ ,]+(?:, -[^ ,]+)*)( [^ ]\S*)?(?:  |$)(.*)", line)
        if match:
            names = [re.sub(r"\[.*", "", name) for name in match.group(1).split(", ")]
            options.update({name: (match.group(2) is not None, match.group(3).strip()) for name in names})
        elif names and line.startswith(" " * 12):
            options.update({name: (options[name][0], options[name][1] + " " + line.strip()) for name in names})
        else:
            names = []
    return options


def completed_options(verb):
    """Returns the options of a command in the completion: {name: (kind or None, values)}."""
    script = f'source "$0"; printf %s "$_lockstep_{verb}_options"'
    done = subprocess.run(["bash", "-c", script, COMPLETION], capture_output=True, text=True, timeout=20, check=True)
    options = {}
    for line in done.stdout.splitlines():
        words = line.split()
        names = [word for word in words if word.startswith("-")]
        kind, *values = words[len(names) :] or [None]
        options.update({name: (kind, values) for name in names})
    return options


def completion_errors(verb, listed, completed):
    for name in sorted(listed.keys() - completed.keys()):
        yield f"lockstep {verb} {name} is not completed"
    for name in sorted(completed.keys() - listed.keys()):
        if (verb, name) not in UNLISTED:
            yield f"lockstep {verb} --help does not list {name}"
    for name in sorted(listed.keys() & completed.keys()):
        takes_value, text = listed[name]
        kind, values = completed[name]
        if takes_value != (kind is not None):
            yield f"lockstep {verb} {name}: the help text and the completion disagree on whether a value follows"
        for value in values:
            if not re.search(rf"(?<![\w-]){re.escape(value)}(?![\w-])", text):
                yield f"lockstep {verb} {name}: the help text does not have the value {value}"


def frozen_help():
    """Returns the help text of each command in the files."""
    texts = {}
    for name in sorted(os.listdir(CLI)):
        with open(os.path.join(CLI, name)) as file:
            command, _, text = file.read().partition("\n")
        texts[command.split()[2] if len(command.split()) > 3 else ""] = text
    return texts


def check_reference():
    """Checks that the section of each command in the reference has all of its options."""
    with open(REFERENCE) as file:
        sections = re.split(r"(?m)^## lockstep ", file.read())
    found = {section.split("\n")[0]: section for section in sections[1:]}
    good = True
    for verb, text in frozen_help().items():
        # Both commands have the options for hosts, which the section of `run` lists.
        section = found.get(verb, "") + (found["run"] if verb == "doctor" else "")
        for name in listed_options(text):
            if verb and name not in ("-h", "--help") and not re.search(rf"(?<![\w-]){name}(?![\w-])", section):
                print(f"cli: docs/reference/options.md: the section lockstep {verb} does not have {name}")
                good = False
    return good


def man_page():
    """Returns the man page: the help texts as they are, in the macros of man(7)."""
    texts = frozen_help()

    def verbatim(text):
        escaped = text.strip("\n").replace("\\", "\\e").replace("-", "\\-")
        return ".nf\n" + re.sub(r"(?m)^(?=[.'])", r"\\&", escaped) + "\n.fi\n"

    page = ".TH LOCKSTEP 1\n.SH NAME\nlockstep \\- distributed data\\-parallel training\n.SH SYNOPSIS\n"
    page += verbatim(texts.pop("").removeprefix("usage: "))
    for verb in verbs(frozen_help()[""]):
        page += f".SH LOCKSTEP {verb.upper()}\n" + verbatim(texts[verb])
    return page


def check_man_page(write):
    if write:
        os.makedirs(os.path.dirname(MAN_PAGE), exist_ok=True)
        with open(MAN_PAGE, "w") as file:
            file.write(man_page())
    with open(MAN_PAGE) as file:
        good = file.read() == man_page()
    if not good:
        print("cli: programs/man/lockstep.1 differs from the help texts; run cli_surface.py --write")
    return good


def check_completion():
    errors = []
    for verb, text in frozen_help().items():
        if verb:
            errors += completion_errors(verb, listed_options(text), completed_options(verb))
    for error in errors:
        print(f"cli: programs/completion/lockstep.bash: {error}")
    return not errors


def check_verbs(bin_dir):
    listed = verbs(help_text(bin_dir, "lockstep --help"))
    missing = [verb for verb in listed if not os.path.exists(os.path.join(CLI, f"lockstep_{verb}.txt"))]
    for verb in missing:
        print(
            f"cli: the verb {verb} has no file tests/lint/cli/lockstep_{verb}.txt; "
            f"start the file with the line '$ lockstep {verb} --help'"
        )
    if not listed:
        print("cli: lockstep --help lists no verbs below a heading 'Commands'")
    return bool(listed) and not missing


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", required=True, help="the directory of the programs")
    parser.add_argument("--write", action="store_true", help="accept the program's output")
    options = parser.parse_args()
    sys.exit(0 if check(options.bin, options.write) else 1)


if __name__ == "__main__":
    main()
