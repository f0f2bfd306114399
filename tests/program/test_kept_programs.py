"""Which programs are kept, and that those that are let go leave nothing behind."""

import re
import sys
from pathlib import Path

import pytest

from autodist_py.program.kept_programs import Bound, KeptPrograms
from tests.support.processes import STEP_OF_A_WEIGHT, ended


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


SCRIPT = f"""{STEP_OF_A_WEIGHT}
import gc

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
    run = ended([sys.executable, "train.py"], tmp_path, {"AUTODIST_KEPT_PROGRAMS": "50"}, timeout=460)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("AUTODIST_KEPT_PROGRAMS") == 1
    before, after = (float(line.split()[1]) for line in run.stdout.splitlines() if line.startswith("MB"))
    print(f"{before:.0f} MB after 100 signatures, {after:.0f} MB after 500")
    assert after - before < 40, (before, after)  # All of them would take 600 more.
