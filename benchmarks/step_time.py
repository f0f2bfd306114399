"""Step time of autodist_py beside tf.distribute, Horovod and torch DDP, on hosts of a core each, over shaped links.

    make bench, or: python -m benchmarks.step_time [--workloads mlp emb cnn resnet tlm dlrm wide] [--hosts 2 3 4 8]
        [--links none 1gbit 200mbit] [--systems NAME...] [--rounds N] [--steps N] [--block SECONDS] [--output FILE]
        [--before CHECKOUT]

Hosts are namespaces of this machine (tools/netlab.sh). Where there are more of them than cores, several share one, and
only the bytes and shaped links tell what as many machines would do. All processes of a workload stay up for all links.
In each round every system trains a block of steps while the others wait, so that what disturbs the machine disturbs all
alike. Printed are medians over rounds: milliseconds a step (on the slowest host), megabytes that a host sent, the
physical bound (the larger one of a lone core's time for its part of the batch, and of the bytes on the wire as fast as
it carries them), and the ratio to the peer that was best in the same round.

Before a change is landed: `--before CHECKOUT` names a checkout of what was before, with its own .venv. Our systems are
run with its code too, and their times in the same round compared.

All systems start from the same weights and are given the same data; exits with 1 where their first losses differ. What
is not installed is left out: `make horovod` installs Horovod, `.venv/bin/python -m pip install torch` PyTorch.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.lab import BEFORE, BenchmarkError, Group, groups, lab, sent_bytes, shape, wire_rate
from benchmarks.step_table import HEADER, Blocks, Cell, disagreements
from benchmarks.systems import ALONE, INTER_OP_THREADS, INTRA_OP_THREADS, SYSTEMS, missing
from benchmarks.workloads import WORKLOADS
from tools.netlab import why_there_is_no_lab

LINKS = ("none", "1gbit", "200mbit")
PEERS = frozenset(name for name, system in SYSTEMS.items() if system.is_peer)
FEWEST_STEPS = 2


def _checkout(text: str) -> Path:
    path = Path(text).resolve()
    if not (path / ".venv/bin/python").exists():
        raise argparse.ArgumentTypeError(f"{path} has no .venv/bin/python: run `make demo` or `make test` there first")
    return path


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--hosts", nargs="+", type=int, default=[2])
    parser.add_argument("--links", nargs="+", default=list(LINKS), help="rates as tc writes them, or none")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40, help="of a block, at most")
    parser.add_argument("--block", type=float, default=1.0, help="about how many seconds a block takes")
    parser.add_argument(
        "--before", type=_checkout, help="a checkout, with its .venv, which our systems are compared with"
    )
    parser.add_argument("--output", type=Path, help="where all that was measured is written, as JSON")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    lacking = why_there_is_no_lab()
    if lacking is not None:
        print(f"the benchmark makes hosts on this machine, and {lacking}", file=sys.stderr)
        return 2
    left_out = {name: why for name in options.systems if (why := missing(name)) is not None}
    for name, why in left_out.items():
        print(f"{name} is left out: {why}")
    systems = [name for name in options.systems if name not in left_out]
    threads = {"intra_op": INTRA_OP_THREADS, "inter_op": INTER_OP_THREADS}
    print(f"threads of each process: {threads['intra_op']} intra-op, {threads['inter_op']} inter-op; one core a host")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # The lab is taken down on the way.
    cells: list[Cell] = []
    differ: list[str] = []
    try:
        for hosts in options.hosts:
            with lab(hosts):
                for workload in options.workloads:
                    differ += measure(workload, hosts, systems, options, cells)
    except BenchmarkError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join([*HEADER, *(row for cell in cells for row in cell.rows())]))
    for row in (row for cell in cells for row in compared(cell)):
        print(row)
    print("\n".join(differ) or "the first losses of all systems agree")
    return int(bool(differ))


def measure(
    workload: str, hosts: int, systems: Sequence[str], options: argparse.Namespace, cells: list[Cell]
) -> list[str]:
    """Add the workload's cells, one a link, to `cells`; what is said of systems that trained otherwise."""
    applying = [name for name in systems if SYSTEMS[name].applies_to(workload)]
    if options.before is not None:
        applying += [f"{name}{BEFORE}" for name in applying if SYSTEMS[name].is_ours]
    folder = Path(tempfile.mkdtemp(prefix="step-time-"))
    shape("none")
    with groups(applying, workload, hosts, folder, options.before) as started:
        losses = {name: group.first_losses() for name, group in started.items()}
        for link in options.links:
            cells.append(measured_cell(workload, hosts, link, started, options))
            print("\n".join(cells[-1].rows()), flush=True)
            if options.output is not None:
                write(options.output, cells)
    of = {name: SYSTEMS[name.removesuffix(BEFORE)] for name in losses}
    exact = {name: each for name, each in losses.items() if of[name].is_exact and not of[name].is_alone}
    if not exact:
        return []
    return [f"{workload}, {hosts} hosts: {text}" for text in disagreements(exact, reference=next(iter(exact)))]


def compared(cell: Cell) -> list[str]:
    """A line for each system that was run with the code of before, too."""
    return [
        f"{cell.workload}, {cell.hosts} hosts, {cell.link}, {name}: "
        f"{cell.ratio(name, name + BEFORE):.3f} of the time before"
        for name in cell.systems
        if f"{name}{BEFORE}" in cell.systems
    ]


def measured_cell(
    workload: str, hosts: int, link: str, started: Mapping[str, Group], options: argparse.Namespace
) -> Cell:
    shape(link)
    started = {name: group for name, group in started.items() if SYSTEMS[name.removesuffix(BEFORE)].runs_over(link)}
    rate = None if link == "none" else wire_rate()
    load = os.getloadavg()[0]
    slowest = max(group.seconds_a_step(FEWEST_STEPS) for group in started.values())
    steps = max(FEWEST_STEPS, min(options.steps, round(options.block / slowest)))
    seconds: dict[str, list[float]] = {name: [] for name in started}
    sent: dict[str, list[float]] = {name: [] for name in started}
    for number in range(options.rounds):
        turn = number % len(started)
        for name in [*started, *started][turn : turn + len(started)]:
            before = sent_bytes()
            seconds[name].append(started[name].seconds_a_step(steps))
            counted = [after - first for after, first in zip(sent_bytes(), before, strict=True)]
            sent[name].append(max(counted) / (steps + 1))  # With the step that is not timed.
    systems = {name: Blocks(tuple(seconds[name]), tuple(sent[name])) for name in started}
    return Cell(workload, hosts, link, systems, ALONE, PEERS, rate, (load, os.getloadavg()[0]))


def write(path: Path, cells: Sequence[Cell]) -> None:
    settings = {"intra_op_threads": INTRA_OP_THREADS, "inter_op_threads": INTER_OP_THREADS, "cores": os.cpu_count()}
    path.write_text(json.dumps({"settings": settings, "cells": [cell.record() for cell in cells]}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
