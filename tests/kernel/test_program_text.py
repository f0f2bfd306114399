"""A program's complete text, read back: the same program, which is printed as the same text."""

from dataclasses import fields, replace

import numpy as np
import pytest
import tensorflow as tf

from autodist_py.kernel.ir.node import node
from autodist_py.kernel.pipeline import PASSES, start
from autodist_py.kernel.printer import format_attribute
from autodist_py.kernel.program import Invariant, Options
from autodist_py.kernel.program_text import format_op, format_program
from autodist_py.kernel.runner import run_passes
from autodist_py.kernel.verify import verify
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer, PSSynchronizer
from tests.support import kernel_programs
from tests.support.dense_layers import two_layers
from tests.support.golden_cases import CASES, SERVERS
from tests.support.program_parser import TextError, parse_program

TWO_SERVERS = replace(kernel_programs.topology(1, 1, worker=1), servers=SERVERS)


def strategy(item, *synchronizers):
    names = [variable.name for variable in item.trainable_variables]
    nodes = (VariableStrategy(name, synchronizers[index % len(synchronizers)]) for index, name in enumerate(names))
    return Strategy(tuple(nodes), tuple(SERVERS))


PROGRAMS = {
    **{name: (kernel_programs.linear_regression, *case) for name, case in CASES.items()},
    "stages": (kernel_programs.two_stages, kernel_programs.topology(2, 1), [AllReduceSynchronizer("RING")]),
    "sparse": (
        kernel_programs.dense_and_sparse,
        kernel_programs.topology(1, 1),
        [AllReduceSynchronizer(sparse_as_dense=True)],
    ),
    "pieces": (two_layers, kernel_programs.topology(2, 1), [AllReduceSynchronizer(bytes_per_pack=64)]),
    "compressed": (
        kernel_programs.linear_regression,
        kernel_programs.topology(1, 1),
        [AllReduceSynchronizer(compressor="HorovodCompressorEF")],
    ),
    "servers": (kernel_programs.dense_and_sparse, TWO_SERVERS, [PSSynchronizer(device) for device in SERVERS]),
    "asynchronous": (
        kernel_programs.linear_regression,
        TWO_SERVERS,
        [PSSynchronizer(tuple(SERVERS)[1], sync=False)],
    ),
}


def stages(name):
    """The program before the first pass, and after each."""
    make, where, how = PROGRAMS[name]
    item = make()
    given = how if isinstance(how, Strategy) else strategy(item, *(how or [AllReduceSynchronizer()]))
    if not given.consistency.is_bsp:
        where = where.apart()
    seen = [start(item, given, where, Options(channel="channel"))]
    run_passes(seen[0], PASSES, [lambda position, name, program: seen.append(program)])
    return seen


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_text_of_a_program_is_read_back_as_the_program(name):
    captured = None
    for program in stages(name):
        text = format_program(program, unfolded=True)
        if Invariant.CAPTURED in program.holds:
            captured = None
        parsed = parse_program(text, captured)
        captured = parsed.item
        assert format_program(parsed, unfolded=True) == text
        assert format_program(parsed) == format_program(program)
        same = [one.name for one in fields(program) if one.name not in ("analysis", "graph", "lowered")]
        assert [getattr(parsed, one) for one in same] == [getattr(program, one) for one in same]
        assert replace(parsed.lowered, servers=()) == replace(program.lowered, servers=())
        assert {op: format_op(one) for op, one in parsed.graph.nodes.items()} == {
            op: format_op(one) for op, one in program.graph.nodes.items()
        }
        verify(parsed)


def test_passes_make_of_a_program_that_was_read_back_what_they_make_of_the_program():
    before, *_, after = stages("worker_0_of_two")
    parsed = parse_program(format_program(before, unfolded=True))
    result = run_passes(parsed, PASSES)
    assert sorted(format_program(result, unfolded=True).splitlines()) == sorted(
        format_program(after, unfolded=True).splitlines()
    )


def test_a_changed_line_is_another_program():
    (before, *_) = stages("worker_0_of_two")
    text = format_program(before, unfolded=True)
    other = parse_program(
        text.replace("rate = Const() {dtype=float64, value=0.2}", "rate = Const() {dtype=float64, value=0.3}")
    )
    assert format_program(other, unfolded=True) != text
    assert other.graph.constant("rate") == 0.3


def test_a_text_that_does_not_have_all_numbers_of_a_constant_is_refused():
    (before, *_) = stages("worker_0_of_two")
    text = format_program(before, unfolded=True).replace("value=0.2}", "value=<float64 [9]>}")
    with pytest.raises(TextError, match="the numbers of constant 'rate'"):
        parse_program(text)


def test_other_numbers_of_a_large_constant_are_another_text():
    first, second = (
        format_op(node("Const", "c", dtype=tf.float32, value=np.full(9, number, np.float32))) for number in (1, 2)
    )
    assert first.startswith("c = Const() {dtype=float32, value=<float32 [9] ")
    assert first != second


@pytest.mark.parametrize(
    ("value", "text"), [(b"w/part_0", "w/part_0"), (b"", ""), (b"a, b", "b'a, b'"), (b"\xff}", "b'\\xff}'")]
)
def test_a_text_that_could_be_taken_for_several_is_quoted(value, text):
    assert format_attribute(tf.compat.v1.AttrValue(s=value)) == text
