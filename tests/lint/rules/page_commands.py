"""Each option on a page for users exists: in a command `lockstep NAME ...`, as one of that command; alone, as `--word`,
as one of some command or in the source of a program of this repository. The pages in OTHER_PROGRAMS name options of
docker, sbatch, pip and others too. Every LOCKSTEP_ variable on these pages is one that env.h, the package or the build
reads, and docs/reference/environment.md has those of env.h."""

import re

from source_tree import Finding

HELP = "tests/lint/cli/lockstep_"
COMMAND = re.compile(r"(?:^|[\s/(`\"'])lockstep (bench|build|doctor|run|status|submit)\b([^`|#\n]*)")
OPTION = re.compile(
    r"^ {2,4}(?:(?P<short>-\w), )?(?P<name>--[a-z][\w-]*)(?P<value>\[?[ =][^a-z\s]\S*)?(?: {2}|$)", re.M
)
VARIABLE = re.compile(r"\bLOCKSTEP_[A-Z][A-Z0-9_]*[A-Z0-9]")
IN_SOURCE = re.compile(r"[\" \[(](--[a-z][\w-]*[a-z0-9])")
ENV, REFERENCE = "lockstep/base/env.h", "docs/reference/environment.md"
ALONE = re.compile(r"`(--[a-z][\w-]*[a-z0-9])[^`\n]*`")
OTHER_PROGRAMS = {
    "docs/how-to/accelerate-transformers.md": "accelerate launch",
    "docs/how-to/containers.md": "docker",
    "docs/how-to/horovod.md": "horovodrun and mpirun",
    "docs/how-to/install.md": "pip",
    "docs/how-to/security.md": "mpirun",
    "docs/how-to/slurm.md": "sbatch and srun",
    "docs/how-to/wheel.md": "pip",
}


def check(tree):
    commands = {
        path[len(HELP) : -len(".txt")]: options_in(tree.text(path))
        for path in tree.paths("tests", ends=(".txt",))
        if path.startswith(HELP)
    }
    sources = "\n".join(map(tree.text, tree.paths(ends=(".cc", ".h", ".py", ".sh", ".in", ".cmake", "CMakeLists.txt"))))
    variables = set(VARIABLE.findall(sources))
    known = {word for options in commands.values() for word in options} | set(IN_SOURCE.findall(sources))
    if ENV in tree:
        for name in sorted(set(VARIABLE.findall(tree.text(ENV))) - set(VARIABLE.findall(tree.text(REFERENCE)))):
            yield Finding(REFERENCE, 1, f"{name} is missing")
    for page in tree.paths(ends=(".md",)):
        if "/internals/" in page or not page.startswith(("docs/", "README")):
            continue
        for number, line in enumerate(tree.lines(page), start=1):
            for command, rest in COMMAND.findall(line):
                for word in unknown(rest.split(), commands.get(command, {}), command == "bench"):
                    yield Finding(page, number, f"lockstep {command} has no option {word}")
            for word in [] if page in OTHER_PROGRAMS else ALONE.findall(line):
                if word not in known:
                    yield Finding(page, number, f"no program of this repository has the option {word}")
            for name in VARIABLE.findall(line):
                if name not in variables:
                    yield Finding(page, number, f"nothing reads {name}")


def options_in(text):
    """Returns option -> whether a word with its value follows."""
    options = {}
    for match in OPTION.finditer(text):
        takes_value = (match.group("value") or "").startswith(" ")
        options[match.group("name")] = takes_value
        if match.group("short"):
            options[match.group("short")] = takes_value
    return options


def unknown(words, options, has_topic):
    """Yields the options in a command line that are not in `options`, up to its program."""
    index = 0
    while index < len(words) and words[index] != "--":
        word = words[index].rstrip(",.;:)")
        if not word.startswith("-"):
            if not has_topic:
                return
        elif word.startswith("--") and re.match(r"--[a-z]", word):
            name = word.partition("=")[0].partition("[")[0]
            if name not in options:
                yield name
            index += options.get(name, False) and "=" not in word
        else:
            index += options.get(word[:2], False) and len(word) == 2
        index += 1


SAMPLE = {
    "tests/lint/cli/lockstep_run.txt": "  -n, --ranks N   number\n  --ship   copy\n  --cores[=N]   bind\n",
    "examples/a.cc": 'table.option("--epochs", epochs);\n',
    "lockstep/base/env.h": 'text("LOCKSTEP_AA"); text("LOCKSTEP_AB");\n',
    "docs/reference/environment.md": "LOCKSTEP_AA @flag\n",
    "docs/how-to/a.md": "`lockstep run -n 2 --ship ./a --any`\n$ build/lockstep run --ranks 2 --shop ./a @flag\n"
    "`--ship` and `--epochs 3`\n`--epoch` @flag\n`lockstep run --cores=2 -- ./a --x`\n"
    "`LOCKSTEP_AB` and LOCKSTEP_AC @flag\n",
}
