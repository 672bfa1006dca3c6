"""`lockstep plan` with programs of the package and of torch."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

PROGRAM = pathlib.Path(__file__).with_name("plan_program.py")
STEPS = 1_000_000  # lockstep plan ends the program before
PARAMETERS = 2 * 256 * 512 + 512 + 256


def lockstep(folder, *words):
    return subprocess.run(
        [os.environ["LOCKSTEP_PROGRAM"], *map(str, words)],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def folder(tmp_path):
    """A folder of a user: data that the program reads, and weights of an earlier run."""
    (tmp_path / "data").mkdir()
    torch.save(torch.randn(32, 256), tmp_path / "data/rows.pt")
    (tmp_path / "checkpoints").mkdir()
    for name in ("weights.pt", "checkpoints/weights.pt"):
        (tmp_path / name).write_text("of an earlier run")
    return tmp_path


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "kind, weights, models",
    [
        ("package", "checkpoints/weights.pt", 1),
        ("fused", "weights.pt", 1),
        ("torch", "new.pt", 1),
        ("gan", "new.pt", 2),
    ],
)
def test_a_program_is_recorded_and_changes_no_file(folder, kind, weights, models):
    before = contents(folder)
    words = ["--nodes", "2,4", "--link", "100m,1g", "--json", "--", sys.executable, PROGRAM, kind, weights, STEPS]
    done = lockstep(folder, "plan", "-n", 2, *words)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["ranks_per_host"] == 2
    assert len(told["steps_s"]) >= 20
    assert told["gradient_bytes"] == pytest.approx(models * 4 * PARAMETERS, rel=0.02)
    steps = {(p["hosts"], p["bits_per_s"], p["method"]): p["step_s"] for p in told["predictions"]}
    assert len(steps) == 2 * 2 * 7
    wire = models * 4 * PARAMETERS * 8 / 100e6
    assert steps[2, 100e6, "float32"] > wire > steps[2, 1e9, "float32"]
    assert steps[4, 100e6, "float32"] > steps[2, 100e6, "float32"] > steps[2, 100e6, "SparseLoCo"]
    assert contents(folder) == before


def test_a_program_does_not_resume(folder):
    program = [sys.executable, PROGRAM, "state", "new.pt"]
    assert lockstep(folder, "run", "-n", 2, "--", *program, 5).stdout.count("resumed False") == 2
    before = contents(folder)
    assert lockstep(folder, "run", "-n", 2, "--", *program, 1).stdout.count("resumed True") == 2
    done = lockstep(folder, "plan", "-n", 2, "--", *program[:-1], "other.pt", STEPS)
    assert done.returncode == 0, done.stderr
    assert contents(folder) == before


def test_the_table_names_the_fastest_method_and_the_limit(folder):
    done = lockstep(
        folder, "plan", "-n", 2, "--link", "100m", "--", sys.executable, PROGRAM, "package", "new.pt", STEPS
    )
    assert done.returncode == 0, done.stderr
    assert "2 ranks on this host" in done.stdout
    assert "float32    bfloat16        int8    PowerSGD     average      DiLoCo  SparseLoCo" in done.stdout
    assert "With 100 Mb/s and float32, the network is the limit from 2 hosts on" in done.stdout


def test_a_program_that_fails_is_shown(folder):
    done = lockstep(folder, "plan", "-n", 2, "--", sys.executable, "-c", "raise ValueError('no such data')")
    assert done.returncode == 1
    assert "ValueError: no such data" in done.stderr
    assert done.stderr.splitlines()[-1] == "lockstep plan: the program ended with exit code 1; its last lines are above"


def test_a_program_without_steps_is_an_error(folder):
    done = lockstep(folder, "plan", "-n", 2, "--", sys.executable, "-c", "import torch")
    assert done.returncode == 64
    assert "the program has made no steps that can be read" in done.stderr


def test_a_program_that_makes_no_step_in_time_is_ended(folder):
    words = [
        "--start-timeout",
        2,
        "--",
        sys.executable,
        "-c",
        "import time; print('loads', flush=True); time.sleep(60)",
    ]
    done = lockstep(folder, "plan", "-n", 2, *words)
    assert done.returncode == 64
    assert "loads" in done.stderr
    assert "no steps that can be read within --start-timeout" in done.stderr


def test_a_signal_ends_the_program_and_leaves_nothing(folder, tmp_path_factory):
    temporary = tmp_path_factory.mktemp("temporary")
    words = ["plan", "-n", "2", "--", sys.executable, PROGRAM, "package", "new.pt", STEPS]
    process = subprocess.Popen(
        [os.environ["LOCKSTEP_PROGRAM"], *map(str, words)],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(temporary)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "makes steps" in process.stderr.readline()
    process.terminate()
    assert process.wait(timeout=30) == 128 + 15
    process.stderr.close()
    assert not list(temporary.glob("lockstep-plan-*"))


def test_files_above_the_folder_are_found(folder):
    below = folder / "scripts"
    below.mkdir()
    (below / "train.py").write_text(PROGRAM.read_text().replace("data/rows.pt", "../data/rows.pt"))
    words = ["--", sys.executable, "train.py", "package", "../weights.pt", STEPS]
    before = contents(folder)
    done = lockstep(below, "plan", "-n", 2, *words)
    assert done.returncode == 0, done.stderr
    assert contents(folder) == before
