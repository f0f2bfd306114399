"""Which programs are kept, and that those that are let go leave nothing behind."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from autodist_py.kept_programs import Bound, KeptPrograms
from tests.processes import ROOT


def test_of_more_than_the_bound_those_go_that_were_not_used_for_longest():
    gone: list[str] = []
    kept = KeptPrograms[str, int]("'step'", Bound(2, lambda said: None), lambda key, made: gone.append(key))
    for number, key in enumerate("ab"):
        kept.add(key, number, "ours")
    assert kept.use("a") == 0
    kept.add("c", 2, "ours")
    assert (gone, kept.use("b"), kept.use("a"), kept.use("c")) == (["b"], None, 0, 2)


def test_what_a_worker_runs_by_itself_lets_go_of_nothing_that_all_run():
    gone: list[str] = []
    kept = KeptPrograms[str, int]("'step'", Bound(2, lambda said: None), lambda key, made: gone.append(key))
    for key, among in (("a", "all"), ("b", ""), ("c", "mine"), ("d", "all"), ("e", "mine"), ("f", ""), ("g", "mine")):
        kept.add(key, 0, among)
    assert gone == ["c"]


def test_the_bound_is_said_once_when_it_is_reached():
    said: list[str] = []
    bound = Bound(1, said.append)
    for what in ("'train'", "'validate'"):
        kept = KeptPrograms[int, int](what, bound)
        kept.add(0, 0, "ours")
        assert len(said) == (what == "'validate'")
        kept.add(1, 0, "ours")
        kept.add(2, 0, "ours")
    (line,) = said
    assert re.search(r"'train' was called with more signatures .* than 1: .*AUTODIST_KEPT_PROGRAMS", line)


SCRIPT = """
import gc
import numpy as np
from autodist_py import AutoDist
autodist = AutoDist()
import tensorflow as tf

weight = tf.Variable(np.ones([3]))

@autodist.function
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.linalg.matvec(tf.reduce_mean(x, 1), weight) ** 2)
    weight.assign_sub(0.01 * tape.gradient(loss, weight))
    return loss

for number in range(500):
    step(np.ones([4, number + 1, 3]))
    if number in (99, 499):
        gc.collect()
        with open("/proc/self/statm") as file:
            print("MB", int(file.read().split()[1]) * 4096 / 1e6)
"""


@pytest.mark.slow
def test_five_hundred_signatures_take_the_memory_of_a_hundred(tmp_path: Path):
    (tmp_path / "train.py").write_text(SCRIPT)
    ended = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "AUTODIST_KEPT_PROGRAMS": "50"},
        capture_output=True,
        text=True,
        timeout=460,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("AUTODIST_KEPT_PROGRAMS") == 1
    before, after = (float(line.split()[1]) for line in ended.stdout.splitlines() if line.startswith("MB"))
    assert after - before < 40, (before, after)  # All of them would take 600 more.
