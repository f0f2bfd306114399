"""Runs the examples of tf.distribute's own documentation, as the installed TensorFlow has it, under one strategy.

Each example's result, or the class of its error, is a line. Devices that the examples name are CPUs here.
"""

import contextlib
import doctest
import inspect
import io
import linecache
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from autodist_py.distribute import MirroredStrategy

THEIRS = tf.distribute.MirroredStrategy
DOCUMENTED = (
    tf.distribute.DistributedDataset,
    tf.distribute.DistributedIterator,
    tf.distribute.DistributedValues,
    tf.distribute.InputContext,
    tf.distribute.ReplicaContext,
    tf.distribute.Strategy,
    tf.distribute.StrategyExtended,
    tf.distribute.MirroredStrategy,
)
FUNCTIONS = ("get_replica_context", "get_strategy", "has_strategy", "in_cross_replica_context")
CPUS = ["CPU:0", "CPU:1"]


class _Instead:
    """A module, of which some names stand for other things."""

    def __init__(self, module: Any, **others: Any):
        self._module, self._others = module, others

    def __getattr__(self, name: str) -> Any:
        return self._others[name] if name in self._others else getattr(self._module, name)


def examples() -> Iterator[tuple[str, list[str]]]:
    """The name of each thing that is documented, and the statements of its examples, in order."""
    things = {name: getattr(tf.distribute, name) for name in FUNCTIONS}
    for owner in DOCUMENTED:
        things[owner.__name__] = owner
        members = inspect.getmembers(owner)
        things |= {f"{owner.__name__}.{name}": member for name, member in members if not name.startswith("_")}
    for name, thing in things.items():
        sources = [one.source for one in doctest.DocTestParser().get_examples(inspect.getdoc(thing) or "")]
        if sources:
            yield name, [re.sub(r"(['\"])/?[gG][pP][uU]:(\d)", r"\1CPU:\2", source) for source in sources]


def outcome(source: str, file: str, names: dict[str, Any]) -> str:
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)  # Where autograph looks for it.
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown):
            exec(compile(source, file, "single"), names)
    except Exception as error:
        return type(error).__name__
    return re.sub(r"0x[0-9a-f]+", "", " ".join(shown.getvalue().split()))


def main(kind: str, results: Path) -> None:
    def made(devices: Any = None, cross_device_ops: Any = None) -> Any:
        if kind == "ours":
            return MirroredStrategy(devices or CPUS, cross_device_ops)
        return THEIRS(devices or CPUS, cross_device_ops or tf.distribute.ReductionToOneDevice())

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * len(CPUS))
    lines = []
    for name, sources in examples():
        module = _Instead(tf, distribute=_Instead(tf.distribute, MirroredStrategy=made))
        names: dict[str, Any] = {"tf": module}
        for number, source in enumerate(sources):
            lines.append(f"{name} {number}: {outcome(source, f'<{name} {number}>', names)}")
    results.write_text("\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
