"""The differential oracle: a program trained as compiled has the values that one device has, after every step.

Both programs run in one process, from the same initial values (the chief's), on the same global batches: one as plain
TensorFlow on one device, the other as autodist_py compiled it. Every variable, optimizer slots included, and every
returned value is compared after each step. It runs on every worker of a cluster (`tests/support/cluster_pool.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

import numpy as np
import tensorflow as tf

from autodist_py import AutoDist
from autodist_py.config.settings import Settings
from autodist_py.program.step import AloneProgram, StepProgram

EXACT = 1e-9
"""Relative, for float64: room for reassociation, none for a mistake."""

SINGLE = 1e-5
"""Relative, for float32."""

Batch = tuple[np.ndarray, ...]
Values = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Training:
    """A single-device program in TF2: its step, and all variables by name, optimizer slots included."""

    step: Callable[..., Any]
    variables: Callable[[], Mapping[str, tf.Variable]]

    def values(self) -> Values:
        return {name: np.array(variable) for name, variable in self.variables().items()}


@dataclass(frozen=True, slots=True)
class GraphTraining:
    """A single-device program in TF1: what is fed, what is run to train, and what is fetched beside."""

    feeds: Sequence[tf.Tensor]
    train: Any
    fetches: Any


@dataclass(frozen=True, slots=True)
class Parts:
    """How the global batch of each step is shared out under `batch="local"`: for each step, each worker's rows."""

    sizes: Sequence[Sequence[int]]

    def own(self, step: int, rank: int, rows: np.ndarray) -> np.ndarray:
        """This worker's part of `rows`."""
        begin = sum(self.sizes[step][:rank])
        return rows[begin : begin + self.sizes[step][rank]]


def compare_function(
    build: Callable[[int], Training],
    batches: Sequence[Batch],
    *,
    seed: int = 1,
    tolerance: float = EXACT,
    parts: Parts | None = None,
    batched: Sequence[str] | None = None,
    between: Callable[[Training, int], None] | None = None,
    autodist: Mapping[str, Any] | None = None,
) -> Values:
    """Train `build`'s program as a plain tf.function and as compiled, and compare after each step.

    Args:
        build: makes the variables, with initial values from the seed, and the step. The program that is compiled is
            built from another seed on every worker but the chief, whose initial values count.
        batches: the step's arguments, one tuple of arrays with the global batch per step.
        seed: for `build`.
        tolerance: the largest difference, relative to the largest value of the tensor.
        parts: each worker's rows, with `batch="local"`.
        batched: see `AutoDist.function`.
        between: called after each step, with each of both programs and the step's number.
        autodist: arguments of AutoDist.

    Returns:
        The variables' last values as compiled.
    """
    with AutoDist(**_options(autodist, parts)) as distributed:
        single = build(seed)
        compiled = build(seed + distributed.rank)
        run_single = tf.function(single.step, input_signature=_signature(batches[0]))
        run_compiled = distributed.function(compiled.step, batched=batched)
        rank = distributed.rank
        initial = single.values()
        for number, batch in enumerate(batches):
            expected = run_single(*map(tf.constant, batch))
            own = batch if parts is None else [parts.own(number, rank, rows) for rows in batch]
            actual = run_compiled(*own)
            size = _batch_size(batch)
            _compare_results(_plain(expected), _plain(actual), number, rank, (parts, size), tolerance)
            distributed.sync()
            _compare_values(single.values(), compiled.values(), f"after step {number + 1}", tolerance)
            if between is not None:
                between(single, number)
                between(compiled, number)
        _require_training(initial, single.values())
        return compiled.values()


def compare_graph(
    build: Callable[[], GraphTraining],
    batches: Sequence[Batch],
    *,
    seed: int = 1,
    tolerance: float = EXACT,
    parts: Parts | None = None,
    between: Callable[[Any, int], None] | None = None,
    autodist: Mapping[str, Any] | None = None,
) -> Values:
    """As `compare_function`, for TF1 graphs: in a `tf.compat.v1.Session` and in the distributed session.

    `build` is called in the graph, whose seed is `seed`; `between` with each session.
    """
    with AutoDist(**_options(autodist, parts)) as distributed, ExitStack() as stack:
        single_graph, single = _build_graph(build, seed)
        plain = stack.enter_context(tf.compat.v1.Session(graph=single_graph))
        compiled_graph, compiled = _build_graph(build, seed, distributed)
        session = distributed.create_distributed_session()
        rank = distributed.rank
        for graph, running in ((single_graph, plain), (compiled_graph, session)):
            running.run(_operation(graph, "initialize"))
        initial = session_values(single_graph, plain)
        for number, batch in enumerate(batches):
            expected = plain.run([single.fetches, single.train], dict(zip(single.feeds, batch, strict=True)))
            own = batch if parts is None else [parts.own(number, rank, rows) for rows in batch]
            actual = session.run([compiled.fetches, compiled.train], dict(zip(compiled.feeds, own, strict=True)))
            size = _batch_size(batch)
            _compare_results(expected[0], actual[0], number, rank, (parts, size), tolerance)
            distributed.sync()
            values = session_values(compiled_graph, session)
            _compare_values(session_values(single_graph, plain), values, f"after step {number + 1}", tolerance)
            if between is not None:
                between(plain, number)
                between(session, number)
        _require_training(initial, session_values(single_graph, plain))
        return values


def session_values(graph: tf.Graph, session: Any) -> Values:
    """All variables of the graph."""
    variables = {variable.op.name: variable for variable in graph.get_collection("variables")}
    return dict(session.run(variables))


def assert_close(actual: Any, expected: Any, what: str, tolerance: float = EXACT) -> None:
    """Both are arrays of the same type and shape, and differ by `tolerance` at most, relative to the largest value.

    Raises:
        AssertionError: they do not; the message says by how much.
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), (
        f"{what} is {actual.dtype}{actual.shape}, and {expected.dtype}{expected.shape} on one device"
    )
    if not np.issubdtype(expected.dtype, np.floating):
        assert np.array_equal(actual, expected), f"{what} is {actual}, and {expected} on one device"
        return
    if not expected.size:
        return
    assert np.array_equal(np.isnan(actual), np.isnan(expected)), f"{what}: {actual} where one device has {expected}"
    scale = max(float(np.nanmax(np.abs(expected), initial=0.0)), np.finfo(expected.dtype).tiny)
    difference = float(np.nanmax(np.abs(actual - expected), initial=0.0)) / scale
    assert difference <= tolerance, (
        f"{what} differs by {difference:.2e} (relative; {tolerance:g} is allowed):\n"
        f"{actual}\non one device:\n{expected}"
    )


def _options(given: Mapping[str, Any] | None, parts: Parts | None) -> dict[str, Any]:
    return {**(given or {}), **({} if parts is None else {"batch": "local"})}


def _batch_size(batch: Batch) -> int | None:
    return len(batch[0]) if batch and np.ndim(batch[0]) else None


def _signature(batch: Batch) -> list[tf.TensorSpec]:
    """One trace for all batch sizes."""
    size = _batch_size(batch)
    shapes = [(None, *np.shape(a)[1:]) if np.ndim(a) and len(a) == size else np.shape(a) for a in batch]
    return [tf.TensorSpec(shape, np.asarray(a).dtype) for shape, a in zip(shapes, batch, strict=True)]


def _build_graph(
    build: Callable[[], GraphTraining], seed: int, distributed: AutoDist | None = None
) -> tuple[tf.Graph, GraphTraining]:
    with tf.Graph().as_default() as graph, ExitStack() as stack:
        if distributed is not None:
            stack.enter_context(distributed.scope())
        tf.compat.v1.set_random_seed(seed)
        training = build()
        tf.group(tf.compat.v1.global_variables_initializer(), name="initialize")
    return graph, training


def _operation(graph: tf.Graph, name: str) -> tf.Operation:
    return graph.get_operation_by_name(name)


def _plain(results: Any) -> Any:
    return tf.nest.map_structure(lambda leaf: leaf.numpy() if isinstance(leaf, tf.Tensor) else leaf, results)


def _compare_results(
    expected: Any, actual: Any, number: int, rank: int, sharing: tuple[Parts | None, int | None], tolerance: float
) -> None:
    """Compare what a step returned. Under `batch="local"`, results with the batch's size are this worker's rows."""
    parts, size = sharing
    tf.nest.assert_same_structure(expected, actual)
    leaves = zip(tf.nest.flatten(expected), tf.nest.flatten(actual), strict=True)
    for position, (wanted, got) in enumerate(leaves):
        if wanted is None:
            assert got is None
            continue
        if parts is not None and np.ndim(wanted) and len(wanted) == size:
            wanted = parts.own(number, rank, wanted)
        assert_close(got, wanted, f"result {position} of step {number + 1}", tolerance)


def _compare_values(expected: Values, actual: Values, when: str, tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        assert_close(actual[name], wanted, f"variable '{name}' {when}", tolerance)


def _require_training(initial: Values, final: Values) -> None:
    """An oracle that trains nothing proves nothing."""
    changed = [n for n, v in final.items() if v.ndim and v.dtype.kind == "f" and not np.array_equal(v, initial[n])]
    assert changed, "on one device, no variable changed"


@contextmanager
def settings(**values: Any) -> Iterator[None]:
    """Every AutoDist that is made in here has these settings, and the environment's for the rest.

    The environment stays as it is: TensorFlow's threads read it, and a change beside that may crash the process.
    """
    there = Settings.from_environment
    with patch.object(Settings, "from_environment", lambda: replace(there(), **values)):
        yield


@contextmanager
def programs_alive() -> Iterator[WeakSet[StepProgram | AloneProgram]]:
    """Those of the programs made in here that something still holds.

    `gc.get_objects` would tell them too, but a tuple that gRPC's thread is filling may have no other holder: that
    thread would end with a SystemError, and the coordinator with it.
    """
    alive: WeakSet[StepProgram | AloneProgram] = WeakSet()

    def noted(kind: type[StepProgram | AloneProgram]) -> Callable[..., None]:
        init = kind.__init__

        def note(program: Any, *args: Any, **options: Any) -> None:
            init(program, *args, **options)
            alive.add(program)

        return note

    with ExitStack() as stack:
        for kind in (StepProgram, AloneProgram):
            stack.enter_context(patch.object(kind, "__init__", noted(kind)))
        yield alive
