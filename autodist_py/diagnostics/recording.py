"""Recorded runs: what the first training steps are given, and what they leave, in files for `autodist verify`.

It owns the files. It works without TensorFlow: it is given values.
"""

import os
import pickle
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from autodist_py.proto.graph_item import GraphItem


@dataclass(frozen=True, slots=True)
class Step:
    """One training step as a worker saw it. Values are arrays, by name.

    Attributes:
        inputs: what it was given.
        ops: values of its ops, each after what it was computed from; only where the run shows them.
        results: what it returned.
        variables: all variables that it uses, after it.
        computed_in: the floating types that its gradients are computed in.
    """

    inputs: Mapping[str, np.ndarray]
    ops: Mapping[str, np.ndarray]
    results: Mapping[str, np.ndarray]
    variables: Mapping[str, np.ndarray]
    computed_in: Collection[str] = ()


class RecordedEnough(SystemExit):
    """Ends the script: all steps that were asked for are recorded."""

    def __init__(self) -> None:
        super().__init__(0)


class Recorder:
    """Writes the steps of one worker."""

    def __init__(self, folder: Path, *, rank: int, steps: int):
        """Write to `folder`, and end the script after `steps` steps of all its programs together."""
        self._folder = folder / f"worker-{rank}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._steps = steps

    def add(self, step: Step) -> None:
        """Write the next step.

        Raises:
            RecordedEnough: it was the last one.
        """
        number = len(os.listdir(self._folder)) + 1
        (self._folder / f"{number}.pickle").write_bytes(pickle.dumps(step))
        if number >= self._steps:
            raise RecordedEnough


class _Program(Protocol):
    def run(self, feeds: Sequence[Any]) -> list[Any]: ...


class RecordedProgram:
    """A program that trains, and whose steps are recorded."""

    goes_among = ""
    """No other programs: the run ends after a few steps."""

    def __init__(
        self,
        program: _Program,
        recorder: Recorder,
        item: GraphItem,
        variables: Callable[[], Mapping[str, Any]],
        *,
        num_results: int,
        op_types: Mapping[str, str],
        computed_in: Collection[str],
    ):
        """Record `program`.

        Args:
            program: it returns a value for each output of `item`; for the first `num_results` is enough.
            recorder: where its steps go.
            item: what it was compiled from.
            variables: their values now, by their names in `item`.
            num_results: how many outputs are the user's; the others are values of ops.
            op_types: the types of those ops, by their names.
            computed_in: the floating types that its gradients are computed in.
        """
        self._program, self._recorder, self._variables = program, recorder, variables
        self._computed_in = frozenset(computed_in)
        self._inputs = [source.name for source in item.inputs if source.kind == "feed"]
        self._results = [f"result {index} ({out.tensor})" for index, out in enumerate(item.outputs[:num_results])]
        ops = [output.tensor for output in item.outputs[num_results:]]
        self._ops = [f"{tensor} ({op_types[tensor.partition(':')[0]]})" for tensor in ops]

    def run(self, feeds: Sequence[Any]) -> list[Any]:
        """One step; a value for each of the user's outputs.

        Raises:
            RecordedEnough: it was the last one to be recorded.
        """
        values = self._program.run(feeds)
        variables = self._variables()
        results, ops = values[: len(self._results)], values[len(self._results) :]
        self._recorder.add(
            Step(
                inputs=_arrays(self._inputs, feeds),
                ops=_arrays(self._ops[: len(ops)], ops),
                results=_arrays(self._results, results),
                variables=_arrays(variables, variables.values()),
                computed_in=self._computed_in,
            )
        )
        return results


def _arrays(names: Iterable[str], values: Iterable[Any]) -> dict[str, np.ndarray]:
    return {
        # What has a method for it gives a scalar of every type, which NumPy itself cannot.
        name: np.array(value.numpy() if hasattr(value, "numpy") else value)
        for name, value in zip(names, values, strict=True)
    }


def recorded_steps(folder: Path) -> dict[int, list[Step]]:
    """What the workers of a run wrote to `folder`, by rank; a run's own files only, as unpickling runs code."""
    found = {}
    for worker in sorted(folder.glob("worker-*")):
        files = sorted(worker.glob("*.pickle"), key=lambda path: int(path.stem))
        found[int(worker.name.removeprefix("worker-"))] = [pickle.loads(path.read_bytes()) for path in files]
    return found
