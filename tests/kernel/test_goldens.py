"""The printed graph of a ten-op program after every pass.

To write the goldens anew after an intended change, and then read the difference:

    UPDATE_GOLDENS=1 pytest tests/kernel/test_goldens.py && git diff tests/kernel/goldens
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from autodist_py.kernel.pipeline import PASSES, start
from autodist_py.kernel.printer import format_program
from autodist_py.kernel.program import Options
from autodist_py.kernel.rewrite import run_passes
from autodist_py.proto.strategy import Node, Strategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer, PSSynchronizer
from tests.kernel import programs

GOLDENS = Path(__file__).parent / "goldens"
SERVERS = {"127.0.0.1:CPU:0": 0, "127.0.0.2:CPU:0": 1}
SHARDS = Node(
    "w",
    None,
    "1,2",
    (Node("w/part_0", AllReduceSynchronizer()), Node("w/part_1", PSSynchronizer("127.0.0.2:CPU:0"))),
    (2, 1),
)
CASES = {
    "one_worker_of_two_replicas": (programs.place(2), None),
    "worker_0_of_two": (programs.place(1, 1, worker=0), None),
    "worker_1_of_two_with_shards": (
        replace(programs.place(1, 1, worker=1), servers=SERVERS),
        Strategy((SHARDS,), tuple(SERVERS)),
    ),
}


def printed(item, place, strategy) -> dict[str, str]:
    """File name -> text, before the first pass and after each."""
    program = start(item, strategy or programs.all_reduce(item), place, Options(channel="channel"))
    texts = {"00-captured": format_program(program) + "\n"}

    def note(position, name, result):
        texts[f"{position:02}-{name}"] = format_program(result) + "\n"

    run_passes(program, PASSES, [note])
    return texts


@pytest.mark.parametrize("case", CASES)
def test_the_printed_graph_after_every_pass_is_its_golden(case):
    texts = printed(programs.linear_regression(), *CASES[case])
    folder = GOLDENS / case
    if os.environ.get("UPDATE_GOLDENS"):
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.txt"):
            old.unlink()
        for name, text in texts.items():
            (folder / f"{name}.txt").write_text(text)
        pytest.skip(f"wrote {len(texts)} goldens to {folder}; read the difference")
    assert sorted(texts) == sorted(path.stem for path in folder.glob("*.txt"))
    for name, text in texts.items():
        assert text == (folder / f"{name}.txt").read_text(), f"{case}/{name} (see the docstring of this file)"


def test_the_compiled_golden_program_trains_as_one_device_does():
    import numpy as np

    random = np.random.default_rng(0)
    feeds = [{"x": random.normal(size=(rows, 3)), "y": random.normal(size=(rows, 1))} for rows in (6, 5, 1)]
    initial = {"w": random.normal(size=(1, 3))}
    item = programs.linear_regression()
    one, one_fetches = programs.run_steps(item, programs.place(1), feeds, initial)
    two, two_fetches = programs.run_steps(item, programs.place(2), feeds, initial)
    for replica in two:
        np.testing.assert_allclose(replica["w"], one[0]["w"], rtol=1e-12)
    np.testing.assert_allclose(two_fetches, one_fetches, rtol=1e-12)
