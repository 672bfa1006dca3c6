"""Which extension `import lockstep` takes, what it leaves as it is, and what the first fused optimizer replaces. One
rank; no launcher."""

import re
import subprocess
import sys
import sysconfig
import types

import pytest

from lockstep import _compatibility

BUILT = {11: ("310", "311", "314"), 12: ("310", "311", "314"), 15: ("311", "314", "315")}

# Every attribute of torch's modules and of their classes, what their functions enclose, and sys.exit().
FIND_CHANGES = """
import sys, types
import torch, torch.nn.utils, torch.amp, torch.optim, torch.distributed, torch.autograd.variable, torch.utils.data

def attributes():
    found = {"sys.exit": sys.exit, "sys.excepthook": sys.excepthook}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "torch" or module is None:
            continue
        for key, value in list(vars(module).items()):
            found[f"{name}.{key}"] = value
            if isinstance(value, type) and value.__module__ == name:
                found.update({f"{name}.{key}.{member}": one for member, one in vars(value).items()})
            if isinstance(value, types.FunctionType):
                for index, cell in enumerate(value.__closure__ or ()):
                    if cell != types.CellType():  # not empty
                        found[f"{name}.{key} calls {index}"] = cell.cell_contents
    return found

before = attributes()
import lockstep
after = attributes()
changed = [name for name, value in before.items() if after.get(name) is not value]
assert not changed, changed
"""

TRAIN = """
import warnings
import torch

def clip_grad_norm_(parameters, max_norm, *args, **options):
    return torch.nn.utils.clip_grad_value_(parameters, max_norm)

torch.nn.utils.clip_grad_norm_ = clip_grad_norm_
import lockstep

net = torch.nn.Linear(3, 1)
ddp = lockstep.DistributedDataParallel(net, lockstep.init())
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    optimizer = lockstep.optim.SGD(ddp, lr=0.1)
    lockstep.optim.SGD(lockstep.DistributedDataParallel(torch.nn.Linear(3, 1), lockstep.init()), lr=0.1)
texts = [str(one.message) for one in caught if "lockstep" in str(one.message)]
assert len(texts) == 1, texts
assert "clip_grad_norm_()" in texts[0] and "optimizer.average_gradients()" in texts[0], texts
net(torch.ones(2, 3)).sum().backward()
torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
optimizer.step()
assert torch.nn.utils.clip_grad_norm_ is clip_grad_norm_
"""


def run(program):
    found = subprocess.run([sys.executable, "-c", program], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def test_import_changes_nothing_of_torch():
    run(FIND_CHANGES)


def test_functions_of_an_unknown_torch():
    run(TRAIN)


@pytest.fixture
def choose(tmp_path, monkeypatch):
    """Returns the folder, in one with extensions for BUILT, that a CPython with this tag and this torch take."""
    for minor, tags in BUILT.items():
        (tmp_path / f"_torch_2_{minor}").mkdir()
        for tag in tags:
            (tmp_path / f"_torch_2_{minor}/_C.cpython-{tag}-x86_64-linux-gnu.so").touch()

    def find(tag, torch):
        suffix = f".cpython-{tag}-x86_64-linux-gnu.so"
        values = {"EXT_SUFFIX": suffix, "Py_GIL_DISABLED": tag.endswith("t")}
        monkeypatch.setattr(sysconfig, "get_config_var", values.__getitem__)
        monkeypatch.setattr(sys, "version_info", types.SimpleNamespace(major=3, minor=int(tag.strip("t")[1:])))
        monkeypatch.setitem(sys.modules, "torch", torch and types.SimpleNamespace(__version__=torch))
        return _compatibility.find(tmp_path).removeprefix(f"{tmp_path}/")

    return find


@pytest.mark.parametrize(
    "version, folder",
    [
        ("2.11.0", "_torch_2_11"),
        ("2.11.1+cpu", "_torch_2_11"),
        ("2.12.10+cu130", "_torch_2_12"),
        ("2.15.0+rocm7.1", "_torch_2_15"),
        ("2.15.3+xpu", "_torch_2_15"),
    ],
)
def test_releases_have_an_extension(choose, version, folder):
    assert choose("314", version) == folder


@pytest.mark.parametrize(
    "version",
    ["2.11.0a0+c0ffee.nv26.05", "2.15.0rc1", "2.12.0.dev20260101+cu130", "2.11.0+gitabc", "2.13.0", "2.16.0", "2.10.0"],
)
def test_another_torch_is_named(choose, version):
    with pytest.raises(
        ImportError, match=rf"built for torch 2\.11, 2\.12 and 2\.15, but this is torch {re.escape(version)}; "
    ):
        choose("314", version)


OWN = "2.11.0a0+c0ffee.nv26.05"


@pytest.fixture
def build(choose, tmp_path, monkeypatch):
    """Adds what `lockstep build` installs for a version of torch; `choose` then finds it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def add(torch, tag="314", version=_compatibility.VERSION, root="."):
        folder = tmp_path / root / f"_torch_{torch}" / f"{version}.cpython-{tag}-x86_64-linux-gnu"
        folder.mkdir(parents=True)
        (folder / f"_C.cpython-{tag}-x86_64-linux-gnu.so").touch()
        return str(folder.relative_to(tmp_path))

    return add


@pytest.mark.parametrize("torch", [OWN, "2.13.0", "2.15.0+cu130"])
def test_a_build_for_exactly_this_torch_comes_first(choose, build, torch):
    folder = build(torch)
    assert choose("314", torch) == folder
    assert choose("314", "2.15.1") == "_torch_2_15"


def test_a_build_in_the_cache(choose, build):
    folder = build(OWN, root="cache/lockstep")
    assert choose("314", OWN) == folder
    assert choose("314", "2.11.0") == "_torch_2_11"


def test_a_build_for_a_cpython_of_no_wheel(choose, build):
    folder = build(OWN, tag="316")
    assert choose("316", OWN) == folder
    with pytest.raises(ImportError, match=r"CPython 3\.10, .* but this is CPython 3\.16; lockstep build compiles it"):
        choose("316", "2.15.0")


@pytest.mark.parametrize("other", [{"torch": "2.11.0a0+c0ffee.nv26.06"}, {"tag": "313"}, {"version": "0.0.9"}])
def test_other_builds_are_not_used(choose, build, other):
    build(**{"torch": OWN, **other})
    with pytest.raises(
        ImportError, match=r"lockstep build compiles it for this one \(about \d+ minutes of one core\)$"
    ):
        choose("314", OWN)


def test_what_may_not_compile(choose):
    with pytest.raises(ImportError, match=r"torch 2\.10\.2; it is too old: pip install 'torch>=2\.11,<2\.16'$"):
        choose("314", "2.10.2")
    with pytest.raises(ImportError, match=r"; lockstep build may fail to compile it .* newer than 2\.15 \(about"):
        choose("314", "2.16.0")


def test_torch_of_this_cpython(choose):
    """One minor version has no extension for each CPython, as torch has not."""
    with pytest.raises(ImportError, match=r"built for torch 2\.11 and 2\.12, but this is torch 2\.15\.0; "):
        choose("310", "2.15.0")
    assert choose("315", "2.15.0") == "_torch_2_15"


def test_cpython_is_looked_at_first(choose):
    with pytest.raises(
        ImportError, match=r"CPython 3\.10, 3\.11, 3\.14 and 3\.15, but this is CPython 3\.9; .*3\.10 or newer$"
    ):
        choose("39", None)
    with pytest.raises(ImportError, match=r"but this is free-threaded CPython 3\.14; .*not supported$"):
        choose("314t", "2.15.0")


def test_no_torch(choose):
    with pytest.raises(ImportError, match=r"but there is no torch: pip install 'torch>=2\.11,<2\.16'$"):
        choose("311", None)
