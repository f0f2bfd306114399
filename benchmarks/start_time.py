"""How long a program takes from its command to the end of its first step, and for a further signature.

    python -m benchmarks.start_time [--ops 100 1000 10000] [--rounds N]

The step is that of `compile_time.py`, with about so many ops. "plain" is the same script without autodist_py, whose
step is a `tf.function`; "one" is `python train.py` on one worker, "two" `autodist run --local 2`, a core for each. All
are run in turns; printed are medians, in seconds.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import sys, time
ops, kind = int(sys.argv[1]), sys.argv[2]
import tensorflow as tf
from benchmarks.layered_steps import WIDTH, deep_mlp, layers_of
if kind != "plain":
    from autodist_py import AutoDist
    autodist = AutoDist()
step = deep_mlp(layers_of(ops))
step = tf.function(step) if kind == "plain" else autodist.function(step)
step(tf.ones([16, WIDTH])).numpy()
first = time.time()
step(tf.ones([24, WIDTH])).numpy()
if kind == "plain" or autodist.is_chief:
    print("times", first, time.time() - first, flush=True)
"""
KINDS = {
    "plain": [sys.executable, "train.py"],
    "one": [sys.executable, "train.py"],
    "two": [sys.executable, "-m", "autodist_py", "run", "--local", "2", "train.py"],
}


def run(kind: str, ops: int, folder: Path) -> tuple[float, float, float]:
    """Seconds until the first step's end, for a further signature, and until the command has ended."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    began = time.time()
    done = subprocess.run(
        [*KINDS[kind], str(ops), kind], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    ended = time.time()
    for line in done.stdout.splitlines():
        _, is_times, rest = line.partition("times ")
        if is_times:
            first, further = map(float, rest.split())
            return first - began, further, ended - began
    raise RuntimeError(f"{kind} printed no times:\n{done.stdout}\n{done.stderr}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=int, nargs="+", default=[100, 1000, 10000])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    table = Table("ops", "program", "to the first step", "a further signature", "in all", "first step / plain")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        for ops in options.ops:
            rounds = [{kind: run(kind, ops, folder) for kind in KINDS} for _ in range(options.rounds)]
            for kind in KINDS:
                seconds = [statistics.median(times) for times in zip(*(one[kind] for one in rounds), strict=True)]
                ratio = statistics.median(one[kind][0] / one["plain"][0] for one in rounds)
                table.add_row(str(ops), kind, *(f"{value:.2f}" for value in seconds), f"{ratio:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
