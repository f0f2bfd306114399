"""A strategy builder and a compressor in a package of their own: installed, found by their names, used."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.planned import SCRIPT
from tests.support.processes import AUTODIST, ROOT

pytestmark = pytest.mark.first

PLUGIN = ROOT / "examples" / "plugin"
GIVEN_UP = "of gradients the signs travel, and the error is added to the next step's"
SPEC = "nodes: [{address: 10.0.0.1, chief: true}, {address: 10.0.0.2}]"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the plug-in is installed in, from a copy: a build writes beside its sources."""
    folder = tmp_path_factory.mktemp("plugin")
    source, target = folder / "source", folder / "installed"
    subprocess.run(["cp", "-r", str(PLUGIN), str(source)], check=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", str(target), str(source)], check=True, timeout=120)
    return target


def run(installed: Path, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (installed, ROOT)))}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    ("strategy", "synchronizer"),
    [
        ("SplitBySize", "AllReduce(AUTO)"),
        ("SplitBySize(threshold=8)", "PS(10.0.0.1:CPU:0)"),
        ("split_by_size:SplitBySize(threshold=8)", "PS(10.0.0.1:CPU:0)"),
    ],
)
def test_an_installed_builder_is_found_by_its_name(
    installed: Path, tmp_path: Path, strategy: str, synchronizer: str
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "spec.yaml").write_text(SPEC)
    ended = run(installed, tmp_path, *AUTODIST, "plan", "--spec", "spec.yaml", "--strategy", strategy, "train.py")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert synchronizer in ended.stdout


def test_what_an_installed_builder_refuses_is_said(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    ended = run(
        installed, tmp_path, *AUTODIST, "plan", "--local", "2", "--strategy", "SplitBySize(threshold=-1)", "train.py"
    )
    assert ended.returncode == 1
    assert "threshold of SplitBySize is a number of bytes >= 0; got -1" in ended.stdout + ended.stderr


def test_a_run_by_an_installed_builder_trains(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace('"/no/such/file.yaml", ', "") + "\nprint(weight.numpy()[0])\n")
    ended = run(
        installed, tmp_path, *AUTODIST, "run", "--local", "2", "--strategy", "SplitBySize(threshold=8)", "train.py"
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("[-0.05 -0.05]") == 2


@pytest.mark.parametrize("name", ["ScaledSign", "scaled_sign:ScaledSign"])
def test_an_installed_compressor_is_found_by_its_name(installed: Path, tmp_path: Path, name: str) -> None:
    """Of two numbers that are equal the mean and the signs are all there is: the step is exact."""
    (tmp_path / "train.py").write_text(SCRIPT.replace('"/no/such/file.yaml", ', "") + "\nprint(weight.numpy()[0])\n")
    strategy = f"AllReduce(compressor='{name}')"
    for command in (("plan", "--local", "2"), ("run", "--local", "2")):
        ended = run(installed, tmp_path, *AUTODIST, *command, "--strategy", strategy, "train.py")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        if command[0] == "plan":
            assert f"weight: {GIVEN_UP}" in ended.stdout
            assert "12 bytes" in ended.stdout
        else:
            assert ended.stdout.count("[-0.05 -0.05]") == 2


SUMMING = """
from dataclasses import dataclass
from typing import ClassVar
from scaled_sign import ScaledSign

@dataclass(frozen=True, slots=True)
class Summing(ScaledSign):
    sums_first: ClassVar[bool] = {sums_first}

    def compress(self, gradients, states, wire):
        return ScaledSign.compress(self, [wire.total(one) / wire.workers for one in gradients], states, wire)
"""


@pytest.mark.parametrize(
    ("strategy", "sums_first", "said"),
    [
        (
            "PS",
            False,
            "nobody knows a sum over workers before; Summing has asked for one, of float64 (3, 2), for variable "
            "'weight'. Use AllReduce for it, or another compressor; sums_first = True says what Summing needs",
        ),
        ("PS", True, "PS got compressor='summing:Summing', which needs a sum over workers before. Use another one, or"),
        ("AllReduce", True, ""),
    ],
)
def test_a_compressor_that_asks_for_a_sum_is_for_collectives_alone(
    installed: Path, tmp_path: Path, strategy: str, sums_first: bool, said: str
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace('"/no/such/file.yaml", ', "") + "\nprint(weight.numpy()[0])\n")
    (tmp_path / "summing.py").write_text(SUMMING.format(sums_first=sums_first))
    given = f"{strategy}(compressor='summing:Summing')"
    ended = run(installed, tmp_path, *AUTODIST, "run", "--local", "2", "--strategy", given, "train.py")
    output = ended.stdout + ended.stderr
    assert said in output
    assert (ended.returncode == 0) is (not said), output
    assert ended.stdout.count("[-0.05 -0.05]") == (0 if said else 2)
