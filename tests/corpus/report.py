"""Runs cells of the corpus and says what became of them: `make corpus` runs all and writes docs/corpus.md.

python -m tests.corpus.report [--programs NAME ...] [--strategies NAME ...] [--clusters NAME ...] [--record FILE]
                              [--write]
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.corpus import cells
from tests.corpus.cells import Outcome, expect
from tests.corpus.header import FAMILIES, STRATEGIES, Header, load, program_names
from tests.support.cluster_pool import (
    THREE_WORKERS,
    TWO_REPLICAS,
    TWO_WORKERS,
    CaseFailedError,
    Cluster,
    same_on_all_workers,
)

TABLE = Path(__file__).resolve().parents[2] / "docs" / "corpus.md"
CLUSTERS = (TWO_REPLICAS, TWO_WORKERS, THREE_WORKERS)
_PREFACE = """# Outcomes of the corpus

Each program of `tests/corpus/programs/` is trained on 1 worker × 2 devices, on 2 and on 3 workers, and compared with
one device: every variable, optimizer slots included, and every result, after every step. *equal*: the same on all of
them, up to what the column *within* says, relative to the largest value of each tensor. *refused*: by name, for the
reason that the program's file states. There is no third outcome. `make corpus` runs all and writes this table; where
it names clusters, the others were not run when it was written.
"""
_SHORT = {TWO_REPLICAS.name: "1 × 2", TWO_WORKERS.name: "2", THREE_WORKERS.name: "3"}

Kinds = Mapping[tuple[str, str, str], str]
"""What became of a program, under a strategy, on a cluster."""


def run_cell(cluster: Cluster, program: str, strategy: str) -> Outcome:
    """The program on all workers, which must end alike, with the same values to the last bit."""
    try:
        outcomes = cluster.run(cells.run, name=program, strategy=strategy)
    except CaseFailedError as error:
        return Outcome("broken", str(error))
    for outcome in outcomes:
        if outcome.kind not in ("equal", "refused"):
            return outcome
    if len({outcome.kind for outcome in outcomes}) > 1:
        return Outcome("broken", f"workers end differently: {[(o.kind, o.text) for o in outcomes]}")
    same_on_all_workers([outcome.trail for outcome in outcomes])
    return outcomes[0]


def table(headers: Mapping[str, Header], kinds: Kinds) -> str:
    """The text of docs/corpus.md."""
    lines = [_PREFACE, f"{len(headers)} programs under {len(STRATEGIES)} strategies."]
    for family in FAMILIES:
        of_family = {name: header for name, header in headers.items() if header.family == family}
        if not of_family:
            continue
        lines += ["", f"## {family[0].upper()}{family[1:]}", ""]
        lines += ["| program | door | within | " + " | ".join(STRATEGIES) + " |"]
        lines += ["| --- | --- | --- |" + " --- |" * len(STRATEGIES)]
        for name, header in of_family.items():
            found = " | ".join(_told(kinds, name, strategy) for strategy in STRATEGIES)
            lines.append(f"| `{name}` | {header.door} | {header.tolerance:g} | {found} |")
    return "\n".join(lines) + "\n"


def rows(text: str) -> dict[str, tuple[str, ...]]:
    """The table's rows, read back: by program, the other columns."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {first.strip("`"): tuple(others) for first, *others in lines}


def _told(kinds: Kinds, program: str, strategy: str) -> str:
    """One word, where a program ends alike on all clusters; else by cluster."""
    found = {shape.name: kinds[key] for shape in CLUSTERS if (key := (program, strategy, shape.name)) in kinds}
    words = sorted(set(found.values()))
    if len(words) == 1 and len(found) == len(CLUSTERS):
        return words[0]
    on = {word: ", ".join(_SHORT[cluster] for cluster, kind in found.items() if kind == word) for word in words}
    return "; ".join(f"{word} on {clusters}" for word, clusters in on.items()) or "not run"


def _run(
    programs: Sequence[str], strategies: Sequence[str], clusters: Sequence[str]
) -> Iterable[tuple[tuple[str, str, str], Outcome, str]]:
    """Each cell, what became of it, and why that is not what the program's header says."""
    for shape in CLUSTERS:
        if shape.name not in clusters:
            continue
        with tempfile.TemporaryDirectory() as folder:
            cluster = Cluster(shape, Path(folder))
            for program in programs:
                for strategy in strategies:
                    try:
                        outcome = run_cell(cluster, program, strategy)
                    except AssertionError as error:
                        outcome = Outcome("broken", str(error))
                    refusal = load(program).header.refusal(strategy, shape.name)
                    yield (program, strategy, shape.name), outcome, expect(outcome, refusal)
            cluster.close()


def _one_line(complaint: str) -> str:
    line = " / ".join(complaint.splitlines())
    return line if len(line) < 900 else f"{line[:300]} ... {line[-600:]}"


def main() -> int:
    """Returns how many cells are not as their headers say, 100 at most."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    shapes = [shape.name for shape in CLUSTERS]
    parser.add_argument("--programs", nargs="*", default=program_names(), choices=program_names(), metavar="NAME")
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=list(STRATEGIES))
    parser.add_argument("--clusters", nargs="+", default=shapes, choices=shapes)
    parser.add_argument("--record", type=Path, help="a file of outcomes, one JSON line each, to go on with")
    parser.add_argument("--write", action="store_true", help="write docs/corpus.md, of all that is recorded")
    options = parser.parse_args()
    kinds: dict[tuple[str, str, str], str] = {}
    if options.record and options.record.exists():
        kinds = {tuple(key): kind for *key, kind in map(json.loads, options.record.read_text().splitlines())}
    wrong, began = 0, time.monotonic()
    for key, outcome, complaint in _run(options.programs, options.strategies, options.clusters):
        wrong += bool(complaint)
        kinds[key] = outcome.kind
        if options.record:
            with options.record.open("a") as record:
                record.write(json.dumps([*key, outcome.kind]) + "\n")
        took, began = time.monotonic() - began, time.monotonic()
        print(*key, f"{took:.1f} s:", f"WRONG: {_one_line(complaint)}" if complaint else outcome.kind, flush=True)
    if options.write:
        TABLE.write_text(table({name: load(name).header for name in program_names()}, kinds))
    print(f"{wrong} cells are not as their programs' headers say", file=sys.stderr)
    return min(wrong, 100)


if __name__ == "__main__":
    sys.exit(main())
