"""The wheel of `make wheel`, installed into a bare virtual environment: two ranks, other versions of torch and CPython,
the programs and the C++ SDK. No compiler is found, except by the SDK's tests."""

import gzip
import importlib.metadata
import math
import pathlib
import re
import struct
import subprocess
import venv
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SITE_PACKAGES = pathlib.Path(pytest.__file__).parents[1]  # has torch
MINOR = int(importlib.metadata.version("torch").split(".")[1])

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
print(f"rank {world.rank} of {world.size}: {net.weight.sum().item():.9f}")
"""


def wheel_file(distribution="lockstep_ddp"):
    found = list((ROOT / "build/wheel").glob(f"{distribution}-*.whl"))
    assert len(found) == 1, "make wheel builds the wheel"
    return found[0]


def output_of(command, env, expect=0, **options):
    done = subprocess.run(
        list(map(str, command)),
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        **options,
    )
    assert done.returncode == expect, done.stdout
    return done.stdout


class Environment:
    """A virtual environment with the wheel; nothing else is on PATH."""

    def __init__(self, folder):
        self.folder = folder
        venv.create(folder, with_pip=True)
        self.site_packages = next(folder.glob("lib/python3*/site-packages"))
        wheels = [wheel_file(), wheel_file("lockstep_ddp_sdk")]
        self.run("pip", "install", "--quiet", "--no-index", "--disable-pip-version-check", *wheels)

    def run(self, program, *arguments, expect=0, **variables):
        """Returns the output of one of the environment's programs."""
        env = {"PATH": str(self.folder / "bin"), "HOME": str(self.folder), **variables}
        return output_of([self.folder / "bin" / program, *arguments], env, expect, cwd=self.folder)

    def write(self, name, text):
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory):
    return Environment(tmp_path_factory.mktemp("bare"))


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory):
    environment = Environment(tmp_path_factory.mktemp("torch"))
    # As if torch had been installed here; a copy has 4 GB.
    for entry in SITE_PACKAGES.iterdir():
        if not (environment.site_packages / entry.name).exists():
            (environment.site_packages / entry.name).symlink_to(entry)
    return environment


def test_content():
    file = wheel_file()
    assert re.fullmatch(r"lockstep_ddp-[\d.]+-py3-none-manylinux_2_34_x86_64\.whl", file.name)
    assert file.stat().st_size <= 25e6
    names = zipfile.ZipFile(file).namelist()
    assert "lockstep/_source.tar.gz" in names and "lockstep/licences/libsodium-dev.txt" in names
    assert not any(name.startswith("lockstep/sdk/") for name in names)
    libraries = [name.rpartition("/")[2] for name in names if ".so" in name]
    assert all(re.match(r"_C\.|liblockstep_(watch|core)", name) for name in libraries), libraries
    programs = {name.rpartition("/")[2] for name in names if "/scripts/" in name and not name.endswith("/")}
    assert programs == {"lockstep", "lockstep-probe"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_two_ranks(with_torch):
    script = with_torch.write("train.py", TRAIN)
    said = with_torch.run("lockstep", "run", "-n", 2, "python", script)
    weights = dict(re.findall(r"rank (\d) of 2: (\S+)", said))
    assert set(weights) == {"0", "1"} and weights["0"] == weights["1"], said


def test_torch_finds_the_backend(with_torch):
    """Without an import of lockstep."""
    script = with_torch.write(
        "backend.py",
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('lockstep')\n"
        "tensor = torch.ones(1)\n"
        "dist.all_reduce(tensor)\n"
        "print('sum', tensor.item())\n",
    )
    assert with_torch.run("lockstep", "run", "-n", 2, "python", script).count("sum 2.0") == 2


def test_hook(with_torch):
    """Active under the launcher only, without PYTHONPATH; it watches a script of torch.distributed."""
    script = with_torch.write(
        "hang.py",
        "import os, sys, time, torch.distributed as dist\n"
        "print('hook', '_lockstep_hook' in sys.modules, os.environ.get('PYTHONPATH'), flush=True)\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank():\n"
        "    time.sleep(100)\n"
        "dist.barrier()\n",
    )
    said = with_torch.run("lockstep", "run", "-n", 2, "--hang-timeout", 4, "python", script, expect=124)
    assert said.count("hook True None") == 2, said
    assert "rank 0 waits in barrier#1 of world" in said and f"it is at {script}:5 in <module>" in said, said
    assert "False" in with_torch.run("python", "-c", "import sys; print('_lockstep_hook' in sys.modules)")


def test_programs(with_torch):
    said = with_torch.run("lockstep", "bench", "all-reduce", "-n", 2, "--size", "4K", "--rounds", 1, "--json")
    assert '"what":"all_reduce"' in said
    assert f"2.{MINOR}." in with_torch.run("lockstep-probe")
    share = with_torch.folder / "share"
    assert (share / "lockstep/bench/baselines/python_step.py").is_file()
    assert (share / "bash-completion/completions/lockstep").is_file() and (share / "man/man1/lockstep.1").is_file()


def test_mpi_is_loaded_when_asked(with_torch):
    script = with_torch.write("train.py", TRAIN)
    said = with_torch.run("python", script, expect=1, LOCKSTEP_TRANSPORT="mpi")
    assert "were not started by an MPI launcher" in said


def test_without_torch(without_torch):
    script = without_torch.write("plain.py", "import os; print('rank', os.environ['RANK'])")
    said = without_torch.run("lockstep", "run", "-n", 2, "python", script)
    assert sorted(re.findall(r"rank \d", said)) == ["rank 0", "rank 1"]
    last = without_torch.run("python", "-c", "import lockstep", expect=1).splitlines()[-1]
    assert re.fullmatch(
        rf"ImportError: lockstep .* was built for torch 2\.{MINOR}, but there is no torch: "
        rf"pip install 'torch>=2\.{MINOR},<2\.{MINOR + 1}'",
        last,
    )


def test_another_torch_is_named(without_torch):
    folder = without_torch.write("other/torch/__init__.py", "__version__ = '2.13.0a0'").parents[1]
    last = without_torch.run("python", "-c", "import lockstep", expect=1, PYTHONPATH=str(folder)).splitlines()[-1]
    assert last.startswith("ImportError: lockstep ") and "torch 2.13.0a0; lockstep build" in last


def cmake_package(environment):
    folder = environment.run("lockstep", "--cmake-dir").strip()
    assert folder == str(environment.site_packages / "lockstep/sdk/lib/cmake/Lockstep")
    return folder


def cmake(*arguments, expect=0):
    return output_of(["cmake", *arguments], {"PATH": "/usr/bin:/bin"}, expect)


def test_sdk(with_torch):
    """A project finds the SDK and its torch; its program runs on two ranks. Neither needs a package of the system."""
    source, build = ROOT / "tests/install/wheel_consumer", with_torch.folder / "consumer"
    package = cmake_package(with_torch)
    cmake("-G", "Ninja", "-S", source, "-B", build, f"-DCMAKE_PREFIX_PATH={package}")
    cmake("--build", build, "-j", 1)
    said = with_torch.run("lockstep", "run", "-n", 2, build / "consumer")
    weights = re.findall(r"weights of rank \d of 2: (\S+)", said)
    assert len(weights) == 2 and len(set(weights)) == 1, said
    for program in ("consumer", "reader"):
        needed = subprocess.run(["readelf", "-d", build / program], capture_output=True, text=True, check=True).stdout
        assert not re.search(r"NEEDED.*(libz|libjpeg|libsodium|libmpi)", needed), needed
    for name, magic, shape in (("images-idx3", 0x803, (3, 2, 2)), ("labels-idx1", 0x801, (3,))):
        header = struct.pack(f">I{len(shape)}I", magic, *shape)
        with gzip.open(with_torch.folder / f"t10k-{name}-ubyte.gz", "wb") as file:
            file.write(header + bytes(math.prod(shape)))
    said = subprocess.run([build / "reader", with_torch.folder], capture_output=True, text=True, check=True).stdout
    assert said.startswith("3 images; JPEG: this build"), said


def test_sdk_refuses_another_torch(with_torch):
    other = with_torch.folder / "other"
    for name in ("include/ATen/core/Tensor.h", "lib/libtorch_cpu.so"):
        with_torch.write(f"other/{name}", "")
    version = "".join(f"#define TORCH_VERSION_{part}\n" for part in ("MAJOR 2", "MINOR 12", "PATCH 9"))
    with_torch.write("other/include/torch/headeronly/version.h", version)
    said = cmake(
        *("-G", "Ninja", "-S", ROOT / "tests/install/wheel_consumer", "-B", with_torch.folder / "refused"),
        f"-DCMAKE_PREFIX_PATH={cmake_package(with_torch)};{other}",
        expect=1,
    )
    assert f"libtorch in {other} is 2.12.9" in " ".join(said.split())
