#!/usr/bin/env python3
"""Compares the help texts of the program lockstep with the files in cli/, so that they change only on purpose, and the
options in these files with those of programs/completion/lockstep.bash.

cli_surface.py --bin DIR          runs the command in the first line of each file ("$ lockstep run --help") and compares
cli_surface.py --bin DIR --write  writes the program's output into the files
"""

import argparse
import difflib
import os
import re
import subprocess
import sys

CLI = os.path.join(os.path.dirname(os.path.abspath(__file__)), "cli")
COMPLETION = os.path.join(CLI, "..", "..", "..", "programs", "completion", "lockstep.bash")
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
    return all([check_verbs(bin_dir), check_completion(), good])


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


def check_completion():
    errors = []
    for name in sorted(os.listdir(CLI)):
        verb = name.removeprefix("lockstep_").removesuffix(".txt")
        if verb == "lockstep":
            continue
        with open(os.path.join(CLI, name)) as file:
            errors += completion_errors(verb, listed_options(file.read()), completed_options(verb))
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
