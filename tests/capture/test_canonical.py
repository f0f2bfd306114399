"""The canonical form: the same code gives the same bytes, whatever the process did before."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tensorflow as tf

from autodist_py.capture.canonical import canonical
from tests.support import capture_steps

ROOT = Path(__file__).resolve().parents[2]


def digests_of_a_process(hash_seed: str, *arguments: str) -> dict[str, dict[str, str]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.capture_steps", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def processes() -> dict[str, dict[str, dict[str, str]]]:
    wanted = {"first": ("1",), "another hash seed": ("4242",), "after unrelated tracing": ("77", "--unrelated")}
    with ThreadPoolExecutor(2) as pool:
        done = {name: pool.submit(digests_of_a_process, *arguments) for name, arguments in wanted.items()}
    return {name: future.result() for name, future in done.items()}


@pytest.mark.parametrize("name", [*capture_steps.FUNCTION_STEPS, "graph_mode"])
@pytest.mark.parametrize("other", ["another hash seed", "after unrelated tracing"])
def test_processes_capture_and_compile_the_same_bytes(processes, name, other):
    assert processes[other][name] == processes["first"][name]


@pytest.mark.parametrize("name", capture_steps.FUNCTION_STEPS)
def test_capturing_and_compiling_again_after_other_tracing_gives_the_same_bytes(name):
    step, args = capture_steps.FUNCTION_STEPS[name]()
    first = capture_steps.capture(step, *args).item
    compiled = capture_steps.compiled_bytes(first)
    capture_steps.unrelated_tracing()
    second = capture_steps.capture(step, *args).item
    assert capture_steps.item_bytes(second) == capture_steps.item_bytes(first)
    assert capture_steps.compiled_bytes(second) == compiled
    assert second.fingerprint == first.fingerprint


def test_building_a_graph_again_gives_the_same_bytes():
    first = capture_steps.graph_mode_item()
    capture_steps.unrelated_tracing()
    assert capture_steps.item_bytes(capture_steps.graph_mode_item()) == capture_steps.item_bytes(first)


def test_another_constant_gives_another_fingerprint():
    w = tf.Variable(tf.ones([3, 1]), name="w")

    def step_of(rate):
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.matmul(x, w))
            w.assign_sub(rate * tape.gradient(loss, w))

        return step

    fingerprints = {
        capture_steps.capture(step_of(rate), capture_steps.batch()).item.fingerprint for rate in (0.1, 0.1, 0.2)
    }
    assert len(fingerprints) == 2


def test_another_branch_gives_another_fingerprint():
    w = tf.Variable(tf.ones([3, 1]), name="w")

    def step_of(factor):
        def step(x):
            with tf.GradientTape() as tape:
                value = tf.matmul(x, w)
                loss = tf.reduce_mean(tf.cond(tf.reduce_sum(value) > 0.0, lambda: value * factor, lambda: value))
            w.assign_sub(tape.gradient(loss, w))

        return step

    fingerprints = {
        capture_steps.capture(step_of(factor), capture_steps.batch()).item.fingerprint for factor in (2.0, 3.0)
    }
    assert len(fingerprints) == 2


def test_functions_of_equal_content_are_one_and_are_named_by_it():
    with tf.Graph().as_default() as graph:
        going = tf.compat.v1.placeholder(tf.bool, [], name="going")
        for _ in range(2):
            tf.cond(going, lambda: tf.constant(1), lambda: tf.constant(2))
    definition = graph.as_graph_def()
    result = canonical(definition, [node.name for node in definition.node])
    names = [function.signature.name for function in result.library.function]
    assert len(definition.library.function) == 4
    assert len(names) == 2
    assert names == sorted(names)
    assert all(name.startswith("function_") for name in names)


def test_what_is_not_asked_for_is_left_out_with_its_functions_and_the_graph_is_not_edited():
    with tf.Graph().as_default() as graph:
        going = tf.compat.v1.placeholder(tf.bool, [], name="going")
        tf.cond(going, lambda: tf.constant(1), lambda: tf.constant(2))
    definition = graph.as_graph_def()
    before = definition.SerializeToString(deterministic=True)
    result = canonical(definition, ["going"])
    assert [node.name for node in result.node] == ["going"]
    assert len(result.library.function) == 0
    assert definition.SerializeToString(deterministic=True) == before


def test_a_canonical_graph_computes_what_the_graph_did():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [], name="x")
        _, looped = tf.while_loop(
            lambda i, _: i < 5, lambda i, v: (i + 1, tf.cond(v > 3.0, lambda: v - 2.0, lambda: v * 3.0)), [0, x]
        )
        tf.identity(looped, name="result")
    definition = graph.as_graph_def()
    result = canonical(definition, [node.name for node in definition.node])
    values = []
    for each in (definition, result):
        with tf.Graph().as_default() as imported:
            tf.import_graph_def(each, name="")
        with tf.compat.v1.Session(graph=imported) as session:
            values.append([float(session.run("result:0", {"x:0": start})) for start in (0.5, 1.0, 4.0)])
    assert values[0] == values[1]


def test_what_the_process_has_made_before_names_nothing_that_a_step_closes_over():
    large, handle = tf.fill([9999], 0.5), tf.raw_ops.SummaryWriter()

    def step(x: tf.Tensor) -> tf.Tensor:
        tf.raw_ops.FlushSummaryWriter(writer=handle)
        return tf.reduce_sum(x) * large[0]

    first = capture_steps.capture(step, capture_steps.batch())
    tf.constant([1.0, 2.0]) + 1.0
    again = capture_steps.capture(step, capture_steps.batch())
    assert len(again.state) == 2
    assert first.item.fingerprint == again.item.fingerprint
