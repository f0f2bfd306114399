"""How far things go through the code, and how large they are: `make house` prints the figures beside their bounds.

A profile hook notes calls between modules: of the pass that combines one dense gradient, and of a step's first call.
Imports are a graph; the rest is counted in the syntax trees. Exit code 1: a figure is over its bound, or
CONTRIBUTING.md has another table.
"""

import ast
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import networkx as nx
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "autodist_py"
FOLDERS = (PACKAGE, "kernel", "proto", "strategy_builders")
LARGEST = 6
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- made by `make house-table` -->\n\n", "\n<!-- to here -->"


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table: what is counted, what it was before the second design, its bound, and what it is."""

    what: str
    before: str
    bound: str
    now: str
    holds: bool


def sources() -> Iterator[tuple[str, Path]]:
    """The hand-written modules, by their dotted names."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "_pb2" not in path.stem and path.resolve() == path:
                yield _dotted(path), path


def _dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == PACKAGE else (PACKAGE, *parts)).removesuffix(".__init__")


def room(module: str) -> str:
    """The folder of a module, as the layers name it: the first name below the package."""
    return module.split(".")[1] if "." in module else PACKAGE


# -- Calls ------------------------------------------------------------------------------------------------------------


@contextmanager
def calls_noted() -> Iterator[list[tuple[str, str]]]:
    """The calls from one module of ours to another meanwhile, in order: (from, to)."""
    names = {str(path): name for name, path in sources()}
    names |= {str(ROOT / PACKAGE / path.relative_to(ROOT)): name for name, path in sources()}
    found: list[tuple[str, str]] = []

    def module_of(frame: FrameType | None) -> str | None:
        while frame is not None:
            if own := names.get(frame.f_code.co_filename):
                return own
            frame = frame.f_back
        return None

    def note(frame: FrameType, event: str, _: Any) -> None:
        target = names.get(frame.f_code.co_filename) if event == "call" else None
        if target is None or frame.f_code.co_name == "<module>":
            return
        source = module_of(frame.f_back)
        if source is not None and source != target:
            found.append((source, target))

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


def gradients_walk() -> list[tuple[str, str]]:
    """The calls by which one dense gradient is combined: of the pass that does it, on one worker of two."""
    from autodist_py.kernel.pipeline import PASSES
    from tests.support import kernel_programs

    program = kernel_programs.started(kernel_programs.linear_regression(), kernel_programs.topology(1, 1))
    for step in PASSES:
        if step.name in ("synchronize", "lower-collectives"):
            with calls_noted() as calls:
                step(program)
            return calls
        program = step(program)
    raise LookupError(f"no pass combines gradients: {[step.name for step in PASSES]}")


def first_call() -> list[tuple[str, str]]:
    """The calls of a step's first call, on one worker of two devices."""
    import tensorflow as tf

    from autodist_py import AutoDist

    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder) / "spec.yaml"
        spec.write_text("nodes: [{address: 127.0.0.1, cpus: [0, 1]}]")
        with AutoDist(str(spec)) as autodist:
            weights = tf.Variable(tf.ones([4, 1]))

            @autodist.function
            def step(x: tf.Tensor) -> tf.Tensor:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(x @ weights))
                weights.assign_sub(0.1 * tape.gradient(loss, weights))
                return loss

            with calls_noted() as calls:
                step(tf.ones([8, 4]))
    return calls


def layers() -> list[list[str]]:
    """The rooms by layer, the highest first, as import-linter is told."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (own,) = (one for one in contracts if one["containers"] == [PACKAGE])
    return [[name.strip() for name in line.split("|")] for line in own["layers"]]


def climbs(calls: list[tuple[str, str]]) -> int:
    """How many kinds of calls go from a room to one of a higher layer."""
    height = {name: -number for number, line in enumerate(layers()) for name in line}
    between = {(room(source), room(target)) for source, target in calls}
    return sum(height[target] > height[source] for source, target in between if source in height and target in height)


# -- Counts -----------------------------------------------------------------------------------------------------------


def imports() -> "nx.DiGraph[str]":
    """Which room imports which."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    for name, path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in modules:
                if module.startswith(f"{PACKAGE}.") and room(module) != room(name):
                    graph.add_edge(room(name), room(module))
    return graph


def cycles(graph: "nx.DiGraph[str]") -> list[set[str]]:
    """The groups of rooms that import each other in a circle."""
    return [group for group in nx.strongly_connected_components(graph) if len(group) > 1]


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """All classes, with their modules."""
    for name, path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                yield name, node


def attributes(node: ast.ClassDef) -> set[str]:
    """The attributes that the methods of a class give it."""
    return {
        target.attr
        for method in node.body
        if isinstance(method, ast.FunctionDef)
        for target in ast.walk(method)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    }


def fields(module: str, name: str) -> int:
    """How many annotated fields the class has."""
    (found,) = (node for own, node in classes() if (own, node.name) == (module, name))
    return sum(isinstance(one, ast.AnnAssign) for one in found.body)


def isinstance_sites() -> list[str]:
    """Where code asks of which class a synchronizer or a compressor is."""
    found = []
    for name, path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                asked = {one.id for one in ast.walk(node.args[1]) if isinstance(one, ast.Name)}
                if any(one.endswith(("Synchronizer", "Compressor")) for one in asked):
                    found.append(name)
    return found


def loose() -> list[str]:
    """The modules that stand in no room, beside those that users import or run: `python -m` runs `__main__`."""
    own = {path.stem for path in (ROOT / PACKAGE).glob("*.py")}
    return sorted(own - {"__init__", "__main__", "autodist", "cli", "keras", "testing", "tf_adapter"})


# -- The table --------------------------------------------------------------------------------------------------------


def figures() -> Iterator[Figure]:
    """All lines of the table."""
    walk = gradients_walk()
    modules = {module for call in walk for module in call}
    yield _figure("a dense gradient: calls across modules, modules", (168, 30), (60, 14), (len(walk), len(modules)))
    call = first_call()
    rooms = {room(module) for one in call for module in one}
    yield _figure("a step's first call: rooms, climbs", (17, 9), (9, 2), (len(rooms), climbs(call)))
    sizes = sorted((len(attributes(node)) for _, node in classes()), reverse=True)[:LARGEST]
    yield _figure("attributes of the largest objects", (28, 21, 18, 13, 13, 12), (12,) * LARGEST, tuple(sizes))
    yield _figure("fields of Program", (22,), (12,), (fields(f"{PACKAGE}.kernel.program", "Program"),))
    sites = isinstance_sites()
    yield _figure("isinstance on synchronizers or compressors: sites", (18,), (4,), (len(sites),))
    yield _figure("cycles of rooms", (1,), (0,), (len(cycles(imports())),))
    yield _figure("loose modules", (21,), (0,), (len(loose()),))
    readme = len((ROOT / "README.md").read_text().split())
    lines = len((ROOT / "docs/architecture.md").read_text().splitlines())
    yield _figure("README words, architecture.md lines", (2600, 472), (1100, 150), (readme, lines))


def _figure(what: str, before: tuple[int, ...], bound: tuple[int, ...], now: tuple[int, ...]) -> Figure:
    def told(values: tuple[int, ...]) -> str:
        return ", ".join(map(str, values))

    return Figure(
        what, told(before), told(bound), told(now), all(one <= most for one, most in zip(now, bound, strict=True))
    )


def table(found: Iterable[Figure]) -> str:
    """The figures as CONTRIBUTING.md has them."""
    rows = [f"| {one.what} | {one.before} | {one.bound} | {one.now} |" for one in found]
    return "\n".join(("| what | before | at most | now |", "| --- | --- | --- | --- |", *rows)) + "\n"


def main() -> int:
    """Prints the table, or with `--write` writes it; 1 if a figure is over its bound, or the page has another table."""
    found = list(figures())
    shown = Table("what", "before", "at most", "now", "")
    for one in found:
        shown.add_row(one.what, one.before, one.bound, one.now, "" if one.holds else "over")
    Console().print(shown)
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, behind = rest.partition(END)
    wanted = before + BEGIN + table(found) + END + behind
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(wanted)
    elif wanted != text:
        print(f"{PAGE.name} has another table: run `make house-table`", file=sys.stderr)
        return 1
    return not all(one.holds for one in found)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
