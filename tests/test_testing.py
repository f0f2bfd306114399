"""What users check their own steps with: `autodist_py.testing`."""

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from autodist_py.diagnostics.comparison import Comparison, magnitude_of, relative_difference

PREAMBLE = """
import numpy as np, tensorflow as tf
from autodist_py.testing import NotEquivalentError, assert_equivalent

weight = tf.Variable(np.ones(3), name="weight")
inputs = [(np.random.default_rng(n).normal(size=(5, 3)), np.ones(5)) for n in range(3)]

def step(x, y):
    with tf.GradientTape() as tape:
        loss = loss_of(x, y)
    weight.assign_sub(0.1 * tape.gradient(loss, weight))
    return {"loss": loss, "y": y}
"""


def script(body: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "check.py"
    path.write_text(textwrap.dedent(PREAMBLE) + textwrap.dedent(body))
    return subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.timeout(120)
def test_an_equivalent_step_passes_and_the_variables_have_been_trained(tmp_path):
    body = """
    def loss_of(x, y):
        return tf.reduce_mean((tf.linalg.matvec(x, weight) - y) ** 2)

    print(assert_equivalent(step, inputs, replicas=3))
    assert not np.allclose(weight, 1.0)
    """
    done = script(body, tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["result", "result", "weight"]


@pytest.mark.timeout(120)
def test_a_builder_and_a_pass_of_ones_own_are_compared(tmp_path):
    body = """
    from dataclasses import dataclass, replace
    from typing import ClassVar
    from autodist_py.kernel.ir.edits import Edits
    from autodist_py.kernel.ir.node import node
    from autodist_py.kernel.program import Invariant
    from autodist_py.kernel.runner import Contract
    from autodist_py.strategy_builders.parameter_server import PS

    def loss_of(x, y):
        return tf.reduce_mean((tf.linalg.matvec(x, weight) - y) ** 2)

    class Noted(PS):
        def build(self, item, resources):
            print("built")
            return super().build(item, resources)

    @dataclass(frozen=True)
    class Ascends:
        name: ClassVar[str] = "ascends"
        after: ClassVar[str] = "replicate"
        contract: ClassVar[Contract] = Contract(requires={Invariant.REPLICATED})
        changes: bool

        def __call__(self, program):
            edits = Edits()
            for update in program.graph.of_type({"AssignSubVariableOp"}) if self.changes else ():
                edits.put(node("AssignAddVariableOp", update.name, update.input, like=update))
            print("passed")
            return replace(program, graph=edits.apply(program.graph))

    class First(PS):
        def build(self, item, resources):
            strategy = super().build(item, resources)
            return replace(strategy, replicas=strategy.replicas[:1])

    assert_equivalent(step, inputs, strategy_builder=Noted(), passes=[Ascends(False)])
    for other in ({"passes": [Ascends(True)]}, {"strategy_builder": First()}):
        try:
            assert_equivalent(step, inputs, **other)
        except Exception as error:
            print(type(error).__name__)
    """
    done = script(body, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["built", "passed", "passed", "InvalidGraphError", "StrategyError"], done.stdout


@pytest.mark.timeout(120)
def test_a_step_that_is_not_equivalent_is_shown_with_what_differs_first(tmp_path):
    body = """
    def loss_of(x, y):  # A mean of means of a replica's own: not what one device computes.
        return tf.math.log(tf.reduce_mean(tf.exp(tf.linalg.matvec(x, weight))))

    try:
        assert_equivalent(step, inputs, batch_statistics="replica")
    except NotEquivalentError as error:
        print(error)
    """
    done = script(body, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "does not do what it does on one device" in done.stdout
    assert "'weight' is the first to differ, at step 1" in done.stdout


@pytest.mark.parametrize(
    ("actual", "expected", "difference"),
    [
        (np.array([1.0, 2.0]), np.array([1.0, 2.0]), 0.0),
        (np.array([1.0, 2.5]), np.array([1.0, 2.0]), 0.25),
        (np.array([1, 2]), np.array([1, 3]), np.inf),
        (np.array([np.nan, 1.0]), np.array([np.nan, 1.0]), 0.0),
        (np.array([np.nan, 1.0]), np.array([0.0, 1.0]), np.inf),
        (np.array([np.nan, 1.0]), np.array([np.inf, 1.0]), np.inf),
        (np.array([np.inf]), np.array([-np.inf]), np.inf),
        (np.array([1.0]), np.array([1.0, 1.0]), np.inf),
        (np.zeros(0), np.zeros(0), 0.0),
        (np.float32(1.0), np.float64(1.0), np.inf),
    ],
)
def test_the_relative_difference_of_two_arrays(actual, expected, difference):
    assert relative_difference(np.asarray(actual), np.asarray(expected)) == difference


def test_a_comparison_keeps_the_largest_difference_and_the_first_over_its_tolerance():
    comparison = Comparison()
    comparison.note("a", 1, 1.0, 1.0, None)
    comparison.note("b", 2, 1.5, 1.0, None)
    comparison.note("a", 3, 3.0, 1.0, None)
    assert (comparison.differences, comparison.first) == ({"a": 2.0, "b": 0.5}, ("b", 2))


def test_what_rounding_leaves_of_terms_that_cancel_is_no_difference():
    comparison = Comparison()
    comparison.note("zero", 1, 3e-16, 0.0, None, magnitude=1.0)
    assert comparison.first is None
    comparison.note("zero", 1, 3e-12, 0.0, None, magnitude=1.0)
    assert comparison.first == ("zero", 1)


def test_small_values_beside_large_ones_are_compared_by_their_own_size():
    comparison = Comparison()
    weights, steps = np.array([100.0, -3.0], np.float32), np.array(1e6, np.float32)
    magnitude = magnitude_of([weights, steps])
    assert magnitude == 100.0
    small = np.array([1e-3, 1e-7], np.float32)
    comparison.note("momentum", 1, small, small * np.float32(1.01), None, magnitude=magnitude)
    assert comparison.first == ("momentum", 1)
