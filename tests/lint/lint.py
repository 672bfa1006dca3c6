#!/usr/bin/env python3
"""Checks this repository by the rules in rules/.

lint.py [RULE...]              checks the repository by the named rules, or by all
lint.py --fix                  updates the code blocks in the docs from the programs that they quote
lint.py --fix translations     records that the Chinese pages agree with what the English pages say now
lint.py --self-test [RULE...]  checks that each rule flags the marked lines of its own sample, and no others
"""

import argparse
import importlib
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
sys.dont_write_bytecode = True

from source_tree import Build, Tree  # noqa: E402

RULES = sorted(name[:-3] for name in os.listdir(os.path.join(HERE, "rules")) if name.endswith(".py"))
FLAG = " @flag"


def rule(name):
    return importlib.import_module(f"rules.{name}")


def lint(names, root, build):
    tree = Tree.of_repository(root, build)
    num_errors = 0
    for name in names:
        for finding in rule(name).check(tree):
            num_errors += not finding.warning
            kind = "warning" if finding.warning else "error"
            print(f"{finding.path}:{finding.line}: {kind}: {finding.text} [{name}]")
    print(f"lint: {num_errors} errors by {len(names)} rules")
    return num_errors == 0


def fix(name, root):
    if not hasattr(rule(name), "fixed"):
        sys.exit(f"lint: the rule {name} only reports; expected docs_code or translations")
    for path, text in rule(name).fixed(Tree.of_repository(root)).items():
        with open(os.path.join(root, path), "w", encoding="utf-8") as file:
            file.write(text)


def self_test(names):
    good = True
    for name in names:
        sample = rule(name).SAMPLE
        marked = {
            (path, number)
            for path, text in sample.items()
            for number, line in enumerate(text.splitlines(), start=1)
            if line.endswith(FLAG)
        }
        clean = {path: text.replace(FLAG + "\n", "\n") for path, text in sample.items()}
        tree = Tree(clean, getattr(rule(name), "SAMPLE_BUILD", None))
        flagged = {(finding.path, finding.line) for finding in rule(name).check(tree)}
        for path, number in sorted(marked - flagged):
            print(f"{name}: does not flag {path}:{number}: {clean[path].splitlines()[number - 1]}")
        for path, number in sorted(flagged - marked):
            print(f"{name}: wrongly flags {path}:{number}: {clean[path].splitlines()[number - 1]}")
        if not marked:
            print(f"{name}: the sample has no line marked with{FLAG}")
        good = good and bool(marked) and marked == flagged
    print(f"lint: {'each rule flags what it should' if good else 'a rule is broken'} ({len(names)} rules)")
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rules", nargs="*", metavar="RULE", help=f"one of: {', '.join(RULES)}")
    parser.add_argument("--self-test", action="store_true", help="check the rules instead of the repository")
    parser.add_argument("--fix", action="store_true", help="update what the rules can fix: docs_code, or those named")
    parser.add_argument("--root", default=os.path.dirname(os.path.dirname(HERE)), help="the repository")
    parser.add_argument(
        "--build", help="a build folder: it must compile the files behind the docs' code, and have the mutations' tests"
    )
    parser.add_argument(
        "--all-parts", action="store_true", help="the build has every optional part, so it must have every test"
    )
    options = parser.parse_args()
    for name in options.rules:
        if name not in RULES:
            parser.error(f"unknown rule '{name}'; expected {', '.join(RULES)}")
    names = options.rules or RULES
    if options.fix:
        for name in options.rules or ["docs_code"]:
            fix(name, options.root)
        return
    build = Build(options.build, options.all_parts) if options.build else None
    sys.exit(0 if (self_test(names) if options.self_test else lint(names, options.root, build)) else 1)


if __name__ == "__main__":
    main()
