"""The text of a ten-op program after every pass: all of its fields, with fragments folded.

To write the goldens anew after an intended change, and then read the difference:

    UPDATE_GOLDENS=1 pytest tests/kernel/test_goldens.py && git diff tests/kernel/goldens
"""

import os
from dataclasses import fields, replace
from pathlib import Path

import pytest
import tensorflow as tf

from autodist_py.kernel.pipeline import PASSES, start
from autodist_py.kernel.program import Cuts, Lowered, Options, Program, Replication
from autodist_py.kernel.program_text import FIELDS, format_op, format_program
from autodist_py.kernel.runner import run_passes
from tests.support import kernel_programs
from tests.support.golden_cases import CASES

GOLDENS = Path(__file__).parent / "goldens"


def printed(item, topology, strategy) -> dict[str, str]:
    """File name -> text, before the first pass and after each."""
    program = start(item, strategy or kernel_programs.all_reduce(item), topology, Options(channel="channel"))
    texts = {"00-captured": format_program(program) + "\n"}

    def note(position, name, result):
        texts[f"{position:02}-{name}"] = format_program(result) + "\n"

    run_passes(program, PASSES, [note])
    return texts


@pytest.mark.parametrize("case", CASES)
def test_the_printed_graph_after_every_pass_is_its_golden(case):
    texts = printed(kernel_programs.linear_regression(), *CASES[case])
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
        assert len(text.splitlines()) <= 80, name
        assert text == (folder / f"{name}.txt").read_text(), f"{case}/{name} (see the docstring of this file)"


def last(topology, strategy):
    item = kernel_programs.linear_regression()
    program = start(item, strategy or kernel_programs.all_reduce(item), topology, Options(channel="channel"))
    return run_passes(program, PASSES)


def test_the_text_of_a_program_has_lines_for_each_of_its_fields():
    grouped = {"cuts": Cuts, "replication": Replication, "lowered": Lowered}
    plain = {field.name for field in fields(Program)} - {"analysis", *grouped}
    parts = {f"{group}.{field.name}" for group, kind in grouped.items() for field in fields(kind)}
    assert {*FIELDS} == {"item"} | plain | parts


@pytest.mark.parametrize("case", CASES)
def test_unfolded_the_text_has_a_line_for_each_op_with_all_that_it_has(case):
    program = last(*CASES[case])
    text = format_program(program, unfolded=True)
    graphs = [program.graph, *(part.graph for one in program.lowered.servers for part in (one.update, one.answer))]
    for graph in graphs:
        for node in graph.nodes.values():
            assert format_op(node) in text
    assert len(format_program(program).splitlines()) < len(text.splitlines())


def test_a_change_within_a_folded_fragment_changes_its_line():
    program = last(*CASES["worker_0_of_two"])
    (op,) = program.lowered.collectives[0].ops
    node = tf.compat.v1.NodeDef()
    node.CopyFrom(program.graph.nodes[op])
    node.attr["communication_hint"].s = b"nccl"
    other = replace(program, graph=program.graph.changed(added=(), replaced=[node]))
    first, second = (format_program(one).splitlines() for one in (program, other))
    (differing,) = (place for place, lines in enumerate(zip(first, second, strict=True)) if len(set(lines)) > 1)
    assert "[RING] of " in first[differing]


def test_the_compiled_golden_program_trains_as_one_device_does():
    import numpy as np

    random = np.random.default_rng(0)
    feeds = [{"x": random.normal(size=(rows, 3)), "y": random.normal(size=(rows, 1))} for rows in (6, 5, 1)]
    initial = {"w": random.normal(size=(1, 3))}
    item = kernel_programs.linear_regression()
    one, one_fetches = kernel_programs.run_steps(item, kernel_programs.topology(1), feeds, initial)
    two, two_fetches = kernel_programs.run_steps(item, kernel_programs.topology(2), feeds, initial)
    for replica in two:
        np.testing.assert_allclose(replica["w"], one[0]["w"], rtol=1e-12)
    np.testing.assert_allclose(two_fetches, one_fetches, rtol=1e-12)
