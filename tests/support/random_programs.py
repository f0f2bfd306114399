"""Random small programs: expressions over a batch, with losses, updates, a write and results among them.

An expression is a list of operations, each on values made before; one that TensorFlow refuses is left out. So every
list is a program, and hypothesis can make it shorter.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from itertools import cycle
from typing import Any

import numpy as np
import tensorflow as tf

from autodist_py import AutoDist, CaptureError, StrategyError
from autodist_py.capture.doors.function import CapturedFunction
from autodist_py.program.step_function import DistributedFunction
from autodist_py.testing import compare
from tests.support.promised import Unpromised
from tests.support.random_parts import DRAWN, FACTORED, LOSSES, OPERATIONS, RESULTS, UPDATES, Gradients, Writes

FEATURES = 3
CLASSES = 4
SIZES = ((7, 5, 8), (1, 4, 2), (6, 6, 3))
"""Numbers of examples of the steps: uneven, with empty replicas, even."""
SOURCES: Mapping[str, Callable[[int], int]] = {
    "arguments": lambda n: n,
    "arguments of two sizes": lambda n: n + n // 2,
    "iterator": lambda n: n,
    "two iterators": lambda n: 3 * n,
    "zipped": lambda n: n + n // 2,
}
"""What gives the step its batch of n labelled examples, and of how many others."""
MAX_RANK = 3
TOLERANCE = 1e-8
SINGLE = 1e-5
"""Of programs with a value in single precision: parts of a sum are rounded before they are added, or the sum is."""


@dataclass(frozen=True, slots=True)
class Operation:
    """`name` of the values number `first` and `second` (counted from the last one made), and a choice it may need."""

    name: str
    first: int
    second: int
    choice: int

    def __str__(self) -> str:
        return f"{self.name}(-{self.first}, -{self.second}, {self.choice})"


@dataclass(frozen=True, slots=True)
class RandomProgram:
    """The operations, and what is made of their values.

    Attributes:
        operations: one after the other.
        loss: how the loss reduces the last value.
        second_loss: as `loss`, of the value before, with gradients of its own; "": there is none.
        order: whether both are of the same variables ("together"), or the second of those that the first has trained
            ("in turn").
        update: how gradients change the variables.
        write: how a value changes a variable that is not trained.
        builder: the strategy.
        sizes: which of `SIZES`.
        source: what the step is given the batch by, see `SOURCES`.
        result: of which type a result is, beside those of the values' own.
        in_turn_with: the strategy of another AutoDist that runs every other step; "": there is none.
        batch_statistics: see `AutoDist`.
    """

    operations: tuple[Operation, ...]
    loss: str
    second_loss: str
    order: str
    update: str
    write: str
    builder: str
    sizes: int
    source: str
    result: str
    in_turn_with: str
    batch_statistics: str

    @property
    def tolerance(self) -> float:
        """How far it may be from one device, relative."""
        return SINGLE if any(operation.name == "single" for operation in self.operations) else TOLERANCE

    def __str__(self) -> str:
        facts = [
            f"{one.name} {getattr(self, one.name)}" for one in fields(self) if one.name not in ("operations", "sizes")
        ]
        return "; ".join([*map(str, self.operations), *facts, f"sizes {SIZES[self.sizes]}"])


Batch = tuple[np.ndarray, ...]


class _Data:
    """The batches of the steps: labelled examples (rows, classes, numbers), and rows of others."""

    def __init__(self, program: RandomProgram, rng: np.random.Generator):
        self._source = program.source
        more = SOURCES[program.source]
        self.batches: list[Batch] = [
            (
                rng.normal(size=(n, FEATURES)),
                rng.integers(0, CLASSES, n),
                rng.integers(0, 3, n).astype(np.float64),
                rng.normal(size=(more(n), FEATURES)),
            )
            for n in SIZES[program.sizes]
        ]
        self.signature = [tf.TensorSpec([None, *array.shape[1:]], array.dtype) for array in self.batches[0]]
        self._iterators = [iter(one) for one in self._datasets()]

    @property
    def arguments(self) -> list[Batch]:
        """Of each step."""
        return self.batches if self.are_arguments else [()] * len(self.batches)

    @property
    def are_arguments(self) -> bool:
        """Whether a step is called with its batch."""
        return self._source.startswith("arguments")

    @property
    def most_parts(self) -> int:
        """In how many parts every batch can be cut, each with examples."""
        return min(_most_parts(batch) for batch in self.batches)

    def of_step(self, arguments: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        """The next batch, in a step that was called with `arguments`."""
        return arguments or tf.nest.flatten([next(iterator) for iterator in self._iterators])

    def _datasets(self) -> Iterator[tf.data.Dataset]:
        """They begin again after the steps of one device, and of each try before."""
        parts = {"iterator": [slice(0, 4)], "zipped": [slice(0, 4)], "two iterators": [slice(0, 3), slice(3, 4)]}
        for part in parts.get(self._source, []):
            rows = [batch[part] for batch in self.batches]
            yield tf.data.Dataset.from_generator(
                lambda rows=rows: iter(rows), output_signature=tuple(self.signature[part])
            ).repeat()


class _InTurn:
    """One step function of several AutoDist objects, which run one step each, in turn."""

    def __init__(self, functions: Sequence[DistributedFunction]):
        self._first, self._turns = functions[0], cycle(functions)

    def captured(self, *arguments: Any) -> CapturedFunction:
        """As the first of them has captured it."""
        return self._first.captured(*arguments)

    def __call__(self, *arguments: Any) -> Any:
        return next(self._turns)(*arguments)


def _evaluate(
    operations: Sequence[Operation],
    inputs: Sequence[tf.Tensor],
    variables: Sequence[tf.Variable],
    *,
    kept: list[Operation] | None = None,
) -> list[tf.Tensor]:
    """The values that `operations` make; those that cannot be made of the static shapes are left out.

    Where `kept` is given it is filled with the others.
    """
    x, ids, w, others = inputs
    table, kernel, scale, places = variables
    values = [
        tf.constant([[0.5, -1.0, 2.0]], tf.float64),
        scale * 1.0,
        w,
        others,
        tf.gather(places, [0, 1, 1]),
        tf.gather(table, ids),
        tf.gather(places, tf.range(FEATURES)),
        tf.tanh(tf.matmul(x, kernel)),
        x,
    ]
    for operation in operations:
        first, second = (values[-1 - index % len(values)] for index in (operation.first, operation.second))
        try:
            made = OPERATIONS[operation.name](first, second, operation.choice)
        except (
            ValueError,
            tf.errors.InvalidArgumentError,
            tf.errors.OutOfRangeError,
        ):  # The last: a scan over nothing.
            continue
        if made.shape.rank is not None and made.shape.rank <= MAX_RANK:
            values.append(made)
            if kept is not None:
                kept.append(operation)
    return values


def _is_valid(program: RandomProgram, data: _Data, variables: Sequence[tf.Variable]) -> bool:
    """Whether one device can make all values of `program`, also those that no result needs.

    It is asked eagerly: of a value that a function does not need TensorFlow trusts the shape, and is wrong then.
    """
    kept: list[Operation] = []
    tf.function(
        lambda *inputs: _evaluate(program.operations, inputs, variables, kept=kept), autograph=False
    ).get_concrete_function(*data.signature)
    made: list[Operation] = []
    for batch in data.batches:
        _evaluate(kept, [tf.constant(array) for array in batch], variables, kept=made)
    return made == kept * len(data.batches)


def _differentiate(
    program: RandomProgram, batch: Sequence[tf.Tensor], variables: Sequence[tf.Variable], kinds: Mapping[int, str]
) -> tuple[list[tf.Tensor], list[tf.Tensor], list[Gradients]]:
    """The values, and the losses of these kinds, by the positions of their values, with the gradients of each."""
    with tf.GradientTape(persistent=True) as tape:
        values = _evaluate(program.operations, batch, variables)
        losses = [LOSSES[kind](values[-1 - position]) for position, kind in kinds.items()]
    gradients = [zip(variables, tape.gradient(loss, variables), strict=True) for loss in losses]
    return values, losses, [[(v, gradient) for v, gradient in pairs if gradient is not None] for pairs in gradients]


def _cut(batch: Sequence[np.ndarray], replicas: int) -> Iterator[list[np.ndarray]]:
    """Each replica's part, as split-batch cuts: all arrays in the same proportions."""
    units = math.gcd(*map(len, batch))
    sharing = min(max(_most_parts(batch), 1), replicas)
    for own in (*np.array_split(np.arange(units), sharing), *[np.arange(0)] * (replicas - sharing)):
        begin, end = (own[0], own[-1] + 1) if len(own) else (0, 0)
        yield [array[begin * len(array) // max(units, 1) : end * len(array) // max(units, 1)] for array in batch]


def _most_parts(batch: Sequence[np.ndarray]) -> int:
    """In how many parts it can be cut so that none has a single row of one array, and several of another."""
    units = math.gcd(*map(len, batch))
    each = {len(array) // max(units, 1) for array in batch}
    return units if len(each) == 1 or min(each) > 1 else units // 2


def _runs_on(
    batches: Iterable[Sequence[np.ndarray]], program: RandomProgram, data: _Data, variables: Sequence[tf.Variable]
) -> bool:
    """Whether TensorFlow can run it on replicas that have these examples."""

    def made(*batch: tf.Tensor) -> list[tf.Tensor]:
        values, _, found = _differentiate(program, batch, variables, _kinds(program))
        return [*values[-3:], *(tf.convert_to_tensor(gradient) for pairs in found for _, gradient in pairs)]

    function = tf.function(made, input_signature=data.signature, autograph=False)
    try:
        for batch in batches:
            function(*map(tf.constant, batch))
    except tf.errors.InvalidArgumentError:
        return False
    return True


def _kinds(program: RandomProgram) -> dict[int, str]:
    kinds = (program.loss, program.second_loss)
    return {position: kind for position, kind in enumerate(kinds) if kind}


def run(program: RandomProgram) -> str:
    """Compare `program` with one device, in all of which docs/exactness.md promises that it is as there.

    Returns:
        "equal"; "equal in part", where something is warned of; "refused: ..." by a CaptureError; "mixes" where it is
        refused for what docs/exactness.md says of losses that mix examples; "not for this builder: ..." where another
        one is advised, as of an update that cannot be cut into shards; "invalid" where one device cannot run it,
        "invalid on nothing" where it cannot run it on a batch of no examples, which a replica has; "invalid on a part"
        where it is warned that ops may mix examples, and it cannot run it on those of a replica.

    Raises:
        AssertionError: it differs; the message has the program.
    """
    if program.batch_statistics == "replica":  # Each replica has numbers of its own.
        program = replace(program, operations=tuple(one for one in program.operations if one.name != DRAWN))
    rng = np.random.default_rng(1)
    data = _Data(program, rng)
    variables = [
        tf.Variable(rng.normal(size=(CLASSES, FEATURES)), name="table"),
        tf.Variable(rng.normal(size=(FEATURES, 2)), name="kernel"),
        tf.Variable(rng.normal(size=FEATURES), name="scale"),
        tf.Variable(rng.normal(size=(CLASSES, FEATURES)), name="places"),
    ]
    update, writes = UPDATES[program.update](variables), Writes(program.write)
    kinds = _kinds(program)
    rounds = [kinds] if program.order == "together" else [{position: kind} for position, kind in kinds.items()]
    traced: dict[int, list[str]] = {}
    """The losses of each graph that the step was traced in."""

    def step(*arguments: tf.Tensor) -> Any:
        batch = data.of_step(arguments)
        all_losses = []
        for kinds_of_round in rounds:
            values, losses, gradients = _differentiate(program, batch, variables, kinds_of_round)
            all_losses += losses
            for pairs in gradients:
                update(pairs)
        traced[id(all_losses[0].graph)] = [loss.name for loss in all_losses]
        read = writes.write(values, all_losses[0])
        shown = [one for one in values[-3:] if one.shape[1:].is_fully_defined()]
        if program.result != "float":
            shown += [RESULTS[program.result](one) for one in shown[-1:] if one.shape.rank]
        return shown, read, writes.value.read_value()

    if not _is_valid(program, data, variables):
        return "invalid"
    # It has nothing for autograph to convert, which takes half the time.
    signature = data.signature if data.are_arguments else []
    single = tf.function(step, input_signature=signature, autograph=False)
    try:
        for arguments in data.arguments:
            single(*map(tf.constant, arguments))
    except (tf.errors.InvalidArgumentError, ValueError):
        return "invalid"
    with ExitStack() as stack:
        builders = [builder for builder in (program.builder, program.in_turn_with) if builder]
        mode = program.batch_statistics
        made = [
            stack.enter_context(AutoDist(strategy_builder=one, batch_statistics=mode, random=mode)) for one in builders
        ]
        replicas = len(made[0].resources.replica_devices)
        nothing = [array[:0] for array in data.batches[0]]
        if replicas > data.most_parts and not _runs_on([nothing], program, data, variables):
            return "invalid on nothing"
        named = ["arguments"] if data.are_arguments else None
        functions = [autodist.function(single, batched=named) for autodist in made]
        distributed: Any = functions[0] if len(made) == 1 else _InTurn(functions)
        try:
            captured = distributed.captured(*data.arguments[0])
            if captured.item.mixtures:
                return f"mixes: {captured.item.mixtures}"
            parts = (part for batch in data.batches for part in _cut(batch, replicas))
            if captured.item.local_ops and not _runs_on(parts, program, data, variables):
                return "invalid on a part"
            comparison = compare(single, distributed, data.arguments, tolerance=program.tolerance)
        except StrategyError as error:
            if program.builder == FACTORED and "no gradient here is one of rows" in str(error):
                return run(replace(program, builder="AllReduce"))
            return f"not for this builder: {error}"
        except CaptureError as error:
            return f"refused: {error}"
    unpromised = Unpromised(captured, traced[id(captured.graph)])
    others = unpromised.variables | {f"result {position}" for position in unpromised.leaves}
    differing = {name for name, difference in comparison.differences.items() if not difference <= program.tolerance}
    assert differing <= others, f"{program}\n{comparison}\n{captured.item}"
    return "equal in part" if others else "equal"
