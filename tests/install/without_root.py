#!/usr/bin/env python3
"""Compiles the package as a user without root, without apt-get and the packages that Lockstep is compiled with, and
trains on two ranks.

Usage: without_root.py build|pip TORCH WORK

build: installs the wheel of `make wheel` beside a torch that it has no extension for, and runs `lockstep build`.
pip: runs `pip install .` in a copy of this source tree, beside the torch that is given.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
USER = 54321  # of no one
VERSION = "2.15.0a0+c0ffee.nv26.05"
HIDDEN = [
    *("/usr/include/" + name for name in ("nlohmann", "CLI", "gloo", "sodium", "sodium.h", "xxhash.h", "xxh3.h")),
    *("/usr/include/" + name for name in ("zlib.h", "zconf.h")),
    *(f"/usr/lib/x86_64-linux-gnu/lib{name}" for name in ("sodium.a", "sodium.so", "z.a", "z.so")),
    *("/usr/share/cmake/nlohmann_json", "/usr/bin/apt", "/usr/bin/apt-get"),
]
TRAIN = """\
import lockstep, torch
world = lockstep.init()
torch.manual_seed(world.rank)
net = torch.nn.Linear(4, 2)
ddp = lockstep.DistributedDataParallel(net, world)
optimizer = lockstep.optim.SGD(ddp, lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    net(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
print("weights", net.weight.sum().item(), world.transport)
"""


def skip(reason):
    print(f"SKIPPED: {reason}")
    sys.exit(77)


def hide():
    """Runs this program again where the files of HIDDEN are not."""
    if os.geteuid() != 0:
        skip("hiding packages in a mount namespace requires root")
    os.execvp("unshare", ["unshare", "--mount", sys.executable, *sys.argv, "hidden"])


def remove_hidden():
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/mnt"], check=True)
    os.makedirs("/mnt/upper")
    os.makedirs("/mnt/work")
    layers = "lowerdir=/usr,upperdir=/mnt/upper,workdir=/mnt/work"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, "/usr"], check=True)
    for path in map(pathlib.Path, HIDDEN):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def make_environment(torch, folder, version):
    """A virtual environment with a torch that says it is of that version: links to the files of the installed one."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([f"/usr/bin/{torch.parents[1].name}", "-m", "venv", folder], check=True)
    (site_packages,) = folder.glob("lib/python3*/site-packages")
    for entry in torch.parent.iterdir():
        if entry != torch and not (site_packages / entry.name).exists():
            (site_packages / entry.name).symlink_to(entry)
    own = site_packages / "torch"
    own.mkdir()
    for entry in torch.iterdir():
        if entry.name not in ("version.py", "__pycache__"):
            (own / entry.name).symlink_to(entry)
    text = (torch / "version.py").read_text()
    if version:
        text = re.sub(r"__version__ = '.*'", f"__version__ = '{version}'", text)
    (own / "version.py").write_text(text)


def copy_sources(folder):
    """The files that git tracks, or would."""
    names = ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(names, check=True, stdout=subprocess.PIPE, text=True).stdout.split("\0")[:-1]:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def main():
    if sys.argv[-1] != "hidden":
        hide()
    mode, torch, work = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
    if not pathlib.Path("/usr/bin", torch.parents[1].name).exists():
        skip(f"the torch of {torch} is for another CPython than /usr/bin/python3, which every user can execute")
    remove_hidden()
    environment, home = work / "env", work / "home"
    make_environment(torch, environment, VERSION if mode == "build" else None)
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()

    def run(program, *words, expect=0):
        kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}
        own = {"PATH": f"{environment}/bin:/usr/bin:/bin", "XDG_CACHE_HOME": str(home), "TMPDIR": str(home)}
        done = subprocess.run(
            ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", environment / "bin" / program, *words],
            env=kept | own,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=home,
        )
        print(done.stdout)
        if done.returncode != expect:
            sys.exit(f"{program} ended with {done.returncode}")
        return done.stdout

    if mode == "build":
        (wheel,) = (ROOT / "build/wheel").glob("lockstep_ddp-*.whl")
        subprocess.run([environment / "bin/pip", "install", "--quiet", "--no-index", wheel], check=True)
    else:
        copy_sources(home / "clone")
    for path in (home, *home.rglob("*")):
        os.chown(path, USER, USER)
    if mode == "build":
        refused = run("python", "-c", "import lockstep", expect=1).splitlines()[-1]
        assert re.search(rf"but this is torch {re.escape(VERSION)}; lockstep build compiles it for this one", refused)
        run("lockstep", "build")
        assert [path.name for path in home.iterdir()] == ["lockstep"], "temporary files are left"
    else:
        for path in (environment, *environment.rglob("*")):
            os.chown(path, USER, USER, follow_symlinks=False)
        said = run("pip", "install", "--no-cache-dir", "-v", home / "clone")
        assert "not installed: zlib, nlohmann-json 3.11, xxHash, CLI11, libsodium; downloading them" in said
        shutil.rmtree(home / "clone")
    said = run("lockstep", "run", "-n", "2", "python", "-c", TRAIN)
    weights = re.findall(r"weights (\S+ \w+)", said)
    assert len(weights) == 2 and len(set(weights)) == 1 and weights[0].endswith("shm"), said
    shutil.rmtree(work)


main()
