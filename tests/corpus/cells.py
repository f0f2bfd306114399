"""A cell of the corpus: a program, under a strategy, on a cluster, beside itself on one device.

`run` is what every worker of a cluster calls. The program on one device is run once, on the chief, for all strategies.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
import tf_keras

from autodist_py import AutoDist, AutoDistError
from tests.corpus.header import STRATEGIES, Header, Seen, load
from tests.support.oracle import assert_close, session_values

_TOLD = 6

Trail = list[dict[str, np.ndarray]]
"""For each step, every value that the program shows after it."""


class Outcome(NamedTuple):
    """What became of a program: "equal", "different", "refused", or "broken": by an error that is no refusal."""

    kind: str
    text: str = ""
    trail: Trail | None = None


class OneDevice:
    """In the place of an AutoDist: the program as it is."""

    rank, num_workers, is_chief = 0, 1, True

    def scope(self) -> AbstractContextManager[None]:
        return nullcontext()

    def function(self, step: Callable[..., Any], **options: Any) -> Any:
        return tf.function(step, reduce_retracing=True)

    def create_distributed_session(self) -> tf.compat.v1.Session:
        return tf.compat.v1.Session()

    def sync(self) -> None:
        pass


def run(name: str, strategy: str) -> Outcome:
    """The program under the strategy; only the chief compares it with one device.

    What it raises beside refusals is no outcome, and fails the case: other workers may wait for one that has raised.
    """
    header = load(name).header
    try:
        with AutoDist(strategy_builder=STRATEGIES[strategy]) as autodist:
            expected = single(name) if autodist.is_chief else None
            actual = _trail(name, autodist)
    except AutoDistError as error:
        return Outcome("refused", f"{type(error).__name__}: {error}")
    try:
        if expected is not None:
            compare(actual, expected, header)
    except AssertionError as error:
        return Outcome("different", str(error))
    return Outcome("equal", "", actual)


@lru_cache(maxsize=2)
def single(name: str) -> Trail:
    """The program on one device. It must show all variables that it makes, and change some from step to step."""
    trail = _trail(name, OneDevice(), is_complete=True)
    first, last = trail[0], trail[-1]
    changed = [key for key, value in last.items() if "variable" in key and not np.array_equal(value, first[key])]
    if len(trail) < 2 or not changed:
        raise ValueError(f"on one device, the program '{name}' trains nothing from its first to its last step")
    return trail


def compare(actual: Trail, expected: Trail, header: Header) -> None:
    """Both have the same values after every step, up to what the header says.

    Raises:
        AssertionError: a value differs by more than it may, or is missing.
    """
    assert len(actual) == len(expected), f"{len(actual)} steps were shown, and {len(expected)} on one device"
    for number, (values, wanted) in enumerate(zip(actual, expected, strict=True), start=1):
        assert values.keys() == wanted.keys(), f"step {number}: {sorted(values.keys() ^ wanted.keys())}"
        complaints = [
            complaint
            for key, value in wanted.items()
            if (complaint := _difference(values[key], value, f"{key} after step {number}", header))
        ]
        assert not complaints, f"{len(complaints)} of {len(wanted)} values: " + "; ".join(complaints[:_TOLD])


def _difference(value: np.ndarray, wanted: np.ndarray, what: str, header: Header) -> str:
    if any(name in what for name in header.still) and np.max(np.abs(value - wanted)) <= header.tolerance:
        return ""
    try:
        assert_close(value, wanted, what, header.tolerance)
    except AssertionError as error:
        return str(error).partition(":\n")[0]
    return ""


def expect(outcome: Outcome, reason: str | None) -> str:
    """Why an outcome is not the expected one; "": it is."""
    if reason is None:
        return "" if outcome.kind == "equal" else f"{outcome.kind}: {outcome.text}"
    if outcome.kind == "refused" and re.search(reason, outcome.text, re.DOTALL):
        return ""
    return f"expected a refusal that says {reason!r}, and it is {outcome.kind}: {outcome.text}"


def _trail(name: str, autodist: Any, *, is_complete: bool = False) -> Trail:
    program = load(name)
    keras.config.set_floatx(program.header.floatx)
    tf_keras.backend.set_floatx(program.header.floatx)
    for library in (keras, tf_keras):
        library.backend.clear_session()  # It numbers what has no name.
    keras.utils.set_random_seed(5)
    trail: Trail = []
    made: list[tf.Variable] = []

    def note(create: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
        made.append(create(**options))
        return made[-1]

    with tf.variable_creator_scope(note):
        for seen in program.train(autodist, program.header):
            autodist.sync()
            trail.append(dict(_values(seen)))
    if is_complete:
        _require_all_shown(name, made, seen)
    return trail


def _require_all_shown(name: str, made: list[tf.Variable], seen: Seen) -> None:
    owners = [owner for owner in seen.owners if not hasattr(owner, "graph")]
    shown = {id(one.value if isinstance(one, keras.Variable) else one) for one in _variables(owners)}
    hidden = [variable.name for variable in made if id(variable) not in shown and not _is_seed(variable)]
    if owners and hidden:
        raise ValueError(f"the program '{name}' shows not all of its variables: {hidden}")


def _is_seed(variable: tf.Variable) -> bool:
    """A bidirectional layer makes one more than it keeps."""
    return variable.name.startswith("seed_generator")


def _values(seen: Seen) -> Iterator[tuple[str, np.ndarray]]:
    for number, result in enumerate(tf.nest.flatten(seen.results)):
        if result is not None:
            value = np.array(result)
            yield f"result {number}", np.stack([value.real, value.imag]) if np.iscomplexobj(value) else value
    number = 0
    for owner in seen.owners:
        if hasattr(owner, "graph"):
            yield from ((f"variable '{name}'", value) for name, value in session_values(owner.graph, owner).items())
            continue
        for variable in _variables(owner):
            name = re.sub(r"_[0-9]+", "", getattr(variable, "path", variable.name))
            yield f"variable {number} '{name}'", np.array(variable)
            number += 1


def _variables(owner: Any) -> list[Any]:
    if isinstance(owner, tf.Variable | keras.Variable):
        return [owner]
    if isinstance(owner, Mapping):
        return [variable for value in owner.values() for variable in _variables(value)]
    if isinstance(owner, list | tuple):
        return [variable for value in owner for variable in _variables(value)]
    variables = owner.variables() if callable(owner.variables) else owner.variables
    if not variables:
        raise ValueError(f"{owner} has no variables")
    return list(variables)
