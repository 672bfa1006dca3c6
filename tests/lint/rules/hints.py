"""Every option and LOCKSTEP_ variable that a sentence in lockstep/ or python/ names exists. A sentence is
a string with a space; options of other programs are listed here."""

import re

from source_tree import Finding

HELP, VARIABLES = "tests/lint/cli/", "docs/reference/environment.md"
STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")
VARIABLE = re.compile(r"\bLOCKSTEP_[A-Z][A-Z0-9_]*")
OTHER_PROGRAMS = {
    "--guarded": "lockstep agent, which nobody types",
    "--ipc": "docker run",
    "--local": "argparse, which abbreviates",
    "--local_rank": "scripts of torch.distributed.launch",
    "--me": "squeue",
    "--mem": "SLURM",
    "--memory": "docker run",
    "--no-build-isolation": "pip",
    "--no-deps": "pip",
    "--nodelist": "srun",
    "--oversubscribe": "mpirun",
    "--overlap": "srun",
    "--pids-limit": "docker run",
    "--prefix": "mpirun",
    "--quoting-style": "tar",
    "--install": "cmake",
    "--security-opt": "docker run",
    "--shm-size": "docker run",
}
# Whole files whose sentences are about another program's options.
OTHER_FILES = ("lockstep/launch/cli/horovodrun.cc", "lockstep/launch/cli/horovodrun.h")


def check(tree):
    options = set(OTHER_PROGRAMS)
    for path in tree.paths("tests", ends=(".txt",)):
        if path.startswith(HELP):
            options.update(OPTION.findall(tree.text(path)))
    variables = set(VARIABLE.findall(tree.text(VARIABLES)))
    for path in tree.paths("lockstep", "python", ends=(".h", ".cc", ".py")):
        if path in OTHER_FILES or path.startswith("python/tests/"):
            continue
        for number, line in enumerate(tree.lines(path), start=1):
            for text in [] if line.lstrip().startswith("//") else STRING.findall(line):
                if " " not in text:
                    continue
                for option in OPTION.findall(text):
                    if option not in options:
                        yield Finding(path, number, f"{option} is not an option of lockstep (tests/lint/cli)")
                for variable in VARIABLE.findall(text):
                    if variable not in variables:
                        yield Finding(path, number, f"{variable} is not in {VARIABLES}")


SAMPLE = {
    HELP + "lockstep_run.txt": "  --bind TEXT  where ranks run\n",
    VARIABLES: "| `LOCKSTEP_LOG` | quiet |\n",
    "lockstep/a.cc": 'auto a = "set --bind none, or LOCKSTEP_LOG";\n'
    'auto b = "leave --binding out"; @flag\n'
    'auto c = "set LOCKSTEP_LOGS"; @flag\n'
    'auto d = {"--what", "docker run --shm-size=1g"};\n'
    '// not "a --sentence of ours"\n',
    "python/lockstep/a.py": 'raise E("try --bnid none") @flag\n',
}
