"""The `autodist` command: `run` a script on its workers, `verify` it, `plan` how it would train, `inspect` a value.

Nothing here imports TensorFlow: scripts do, in processes of their own.
"""

import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console

from autodist_py import __version__
from autodist_py.cluster.launch.brief import Noise
from autodist_py.cluster.launch.console import screens
from autodist_py.cluster.launch.early import EarlyWorkers
from autodist_py.cluster.launch.foreground import run_chief
from autodist_py.cluster.launch.local import Command
from autodist_py.config.resource_spec import load_resource_spec, local_resource_spec
from autodist_py.config.settings import (
    OUTPUT_VARIABLE,
    PLAN_DIR_VARIABLE,
    RESOURCE_SPEC_VARIABLE,
    SEED_VARIABLE,
    STRATEGY_VARIABLE,
    TIMELINE_VARIABLE,
    WORKER_VARIABLES,
    Settings,
)
from autodist_py.diagnostics.overlap import Overlap
from autodist_py.diagnostics.plan import planned
from autodist_py.diagnostics.verify import RunFailedError, Script, compare_runs, run_quietly
from autodist_py.proto.errors import AutoDistError
from autodist_py.proto.resource_spec import YAML_SUFFIXES
from autodist_py.proto.values import load_value

_FILE = click.Path(exists=True, dir_okay=False, readable=True, path_type=Path)
_TENSORFLOW_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_STRATEGY = click.option(
    "--strategy",
    metavar="BUILDER",
    help="The strategy builder, such as 'PS(staleness=2)', whatever the script says.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="autodist")
def main() -> None:
    """Train single-device TensorFlow code on several devices and workers."""


@main.command(context_settings={"allow_interspersed_args": False})
@click.option("--local", "workers", type=click.IntRange(min=1), metavar="N", help="N workers on this machine.")
@click.option("--spec", type=_FILE, metavar="FILE", help="The workers of a resource spec (YAML).")
@click.option("--cpus", type=click.IntRange(min=1), metavar="K", help="With --local: K CPU devices per worker.")
@click.option(
    "--timeline",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE",
    help="Write what the workers do in a few steps, for chrome://tracing or ui.perfetto.dev; say what they waited for.",
)
@click.option("--all-output", is_flag=True, help="Show all that all workers, and TensorFlow's start, print.")
@_STRATEGY
@click.argument("script", type=_FILE)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def run(
    workers: int | None,
    spec: Path | None,
    cpus: int | None,
    timeline: Path | None,
    all_output: bool,
    strategy: str | None,
    script: Path,
    arguments: tuple[str, ...],
) -> None:
    """Run SCRIPT with ARGS on every worker, with this Python.

    The script starts on all workers at once, and each waits for the others in its AutoDist object.

    Each line of output starts with the rank of its worker: all of the chief's, of the others warnings, errors and what
    comes after an error. What TensorFlow says whenever it starts is left out, unless TF_CPP_MIN_LOG_LEVEL is 0. A line
    that the chief keeps rewriting (a progress bar) stays at the bottom of a terminal; elsewhere its last state is
    printed. The script's input is empty. Ctrl-C is passed on to the chief, which has 15 s to end.

    The exit code is the chief's, 128 + n if signal n ended it. If a signal that `autodist run` did not send ended the
    chief, it says so, and for SIGKILL what the kernel counts of ends for lack of memory.
    """
    _require_one_of_local_and_spec(workers, spec, cpus)
    if timeline is not None and not timeline.absolute().parent.is_dir():
        raise click.UsageError(f"--timeline is a file in a folder that exists; got {timeline}")
    with _spec_file(workers, spec, cpus) as spec_file:
        if all_output:
            os.environ[OUTPUT_VARIABLE] = "all"
        output, errors = screens(_new_filter(os.environ))
        environment = _chief_environment(spec_file, output.console, strategy)
        if timeline is not None:
            environment[TIMELINE_VARIABLE] = str(timeline.absolute())
        before = _written(timeline)
        command = Command([sys.executable, str(script), *arguments], os.getcwd(), environment)
        code = run_chief(
            command.line,
            environment,
            output=output,
            errors=errors,
            start_others=lambda descriptor: _started_others(spec_file, command, descriptor),
        )
        if timeline is not None and _written(timeline) != before:
            output.show(str(Overlap.of(timeline)))
    sys.exit(code)


@main.command(context_settings={"allow_interspersed_args": False})
@click.option("--workers", type=click.IntRange(min=1), metavar="N", help="N workers on this machine (default: 2).")
@click.option("--spec", type=_FILE, metavar="FILE", help="The workers of a resource spec (YAML).")
@click.option("--cpus", type=click.IntRange(min=1), metavar="K", help="With --workers: K CPU devices per worker.")
@click.option("--steps", type=click.IntRange(min=1), default=3, show_default=True, metavar="S", help="Training steps.")
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    metavar="T",
    help="The largest relative difference that is none (default: by type; 1e-4 for float32).",
)
@_STRATEGY
@click.argument("script", type=_FILE)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def verify(
    workers: int | None,
    spec: Path | None,
    cpus: int | None,
    steps: int,
    tolerance: float | None,
    strategy: str | None,
    script: Path,
    arguments: tuple[str, ...],
) -> None:
    """Train the first steps of SCRIPT on one device and distributed, and compare.

    On one device its own code is run, as without autodist_py. Compared are what each step returns and all variables
    after it; the script ends after S steps of training. What it prints is shown only if it fails. Random numbers are
    seeded alike where the script does not; whatever resource spec it names, it runs on the workers given here.

    The exit code is 0 if all is equal, 1 if something differs, and 2 if it cannot be compared.
    """
    if workers is not None and spec is not None:
        raise click.UsageError("One of --workers and --spec says which workers to run on. Received: both.")
    if cpus is not None and spec is not None:
        raise click.UsageError("--cpus goes with --workers; a resource spec lists the `cpus` of each node itself.")
    console = Console()
    with (
        _spec_file(None if spec else workers or 2, spec, cpus) as distributed,
        _spec_file(1, None, None) as one_device,
        tempfile.TemporaryDirectory(prefix="autodist-") as folder,
    ):
        command = [sys.executable, str(script), *arguments]
        environment = _chief_environment(distributed, console, strategy) | {SEED_VARIABLE: str(secrets.randbits(31))}
        title = f"the workers of {spec}" if spec else f"{workers or 2} workers"
        try:
            equal = compare_runs(
                Script(command, environment, Path(folder), steps), one_device, distributed, tolerance, title, console
            )
        except RunFailedError as error:
            console.print(error.output, end="", markup=False, highlight=False, soft_wrap=True)
            Console(stderr=True).print(f"Error: {error}", markup=False, highlight=False, soft_wrap=True)
            sys.exit(error.code if error.code > 128 else 2)
        except AutoDistError as error:
            Console(stderr=True).print(f"Error: {error}", markup=False, highlight=False, soft_wrap=True)
            sys.exit(2)
    sys.exit(0 if equal else 1)


@main.command(context_settings={"allow_interspersed_args": False})
@click.option("--local", "workers", type=click.IntRange(min=1), metavar="N", help="For N workers on this machine.")
@click.option("--spec", type=_FILE, metavar="FILE", help="For the workers of a resource spec (YAML).")
@click.option("--cpus", type=click.IntRange(min=1), metavar="K", help="With --local: K CPU devices per worker.")
@_STRATEGY
@click.option(
    "--save",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE",
    help="Save the strategy, as JSON (.json) or binary (.pb); FromFile(path='FILE') trains by it.",
)
@click.argument("script", type=_FILE)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def plan(
    workers: int | None,
    spec: Path | None,
    cpus: int | None,
    strategy: str | None,
    save: Path | None,
    script: Path,
    arguments: tuple[str, ...],
) -> None:
    """Show how SCRIPT would be trained: which variable where, and what a step sends over which link.

    The script runs in one process until it would take its first training step; no worker is started, and nothing is
    trained. The nodes need not be there.
    """
    _require_one_of_local_and_spec(workers, spec, cpus)
    console = Console(soft_wrap=True)
    with _spec_file(workers, spec, cpus) as spec_file, tempfile.TemporaryDirectory(prefix="autodist-") as folder:
        environment = _chief_environment(spec_file, console, strategy) | {PLAN_DIR_VARIABLE: folder}
        code, printed = run_quietly([sys.executable, str(script), *arguments], environment)
        try:
            made = planned(Path(folder))
            if made is not None and save is not None:
                made.save(save)
        except AutoDistError as error:
            raise click.ClickException(str(error)) from error
    if made is None:
        console.print(printed, end="", markup=False, highlight=False)
        raise click.ClickException(
            f"the script failed (exit code {code})"
            if code
            else "the script came to no training step: nothing that AutoDist made computed gradients and was run"
        )
    console.print(made.text, markup=False, highlight=False)


def _written(file: Path | None) -> tuple[int, int] | None:
    """What tells whether a file has been written since."""
    if file is None or not file.exists():
        return None
    status = file.stat()
    return status.st_ino, status.st_mtime_ns


def _started_others(spec_file: Path, command: Command, output: int) -> EarlyWorkers | None:
    """All workers but the chief, started; None: there are none, or the chief will say why they cannot be started."""
    try:
        resources, settings = load_resource_spec(spec_file), Settings.from_environment(command.environment)
        if len(resources.workers) == 1 or settings.launch == "none":
            return None
        return EarlyWorkers(resources, command, settings, output=output)
    except (AutoDistError, OSError):
        return None


def _new_filter(environment: Mapping[str, str]) -> Callable[[], Callable[[str], bool]]:
    """What makes, for an output of the chief, what tells of each of its lines whether it is not shown."""
    is_asked_for = environment.get(OUTPUT_VARIABLE) == "all" or environment.get(_TENSORFLOW_LOG_LEVEL) == "0"
    return (lambda: lambda line: False) if is_asked_for else (lambda: Noise().has)


def _require_one_of_local_and_spec(workers: int | None, spec: Path | None, cpus: int | None) -> None:
    if (workers is None) == (spec is None):
        given = "neither" if workers is None else "both"
        raise click.UsageError(f"Exactly one of --local and --spec says which workers to run on. Received: {given}.")
    if cpus is not None and spec is not None:
        raise click.UsageError("--cpus goes with --local; a resource spec lists the `cpus` of each node itself.")


@contextmanager
def _spec_file(workers: int | None, spec: Path | None, cpus: int | None) -> Iterator[Path]:
    """The file with the resource spec, checked; for `--local` one that is removed in the end."""
    try:
        checked = load_resource_spec(spec) if spec is not None else local_resource_spec(workers or 1, cpus or 1)
    except AutoDistError as error:
        raise click.UsageError(str(error)) from error
    if spec is not None:
        yield spec.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="autodist-") as folder:
        path = Path(folder) / "resource_spec.yaml"
        checked.save(path)
        yield path


def _chief_environment(spec_file: Path, console: Console, strategy: str | None) -> dict[str, str]:
    """Our environment, as the chief shall see it: of no other run's worker, unbuffered, as wide as the terminal."""
    environment = {name: value for name, value in os.environ.items() if name not in WORKER_VARIABLES}
    environment |= {RESOURCE_SPEC_VARIABLE: str(spec_file), "PYTHONUNBUFFERED": "1"}
    if environment.get(OUTPUT_VARIABLE) != "all":
        environment.setdefault(_TENSORFLOW_LOG_LEVEL, "1")  # No information of its own; 0 has it.
    if strategy is not None:
        environment[STRATEGY_VARIABLE] = strategy
    if console.is_terminal:
        # rich draws progress bars into a pipe when told that what reads it understands terminal codes.
        environment.setdefault("TTY_COMPATIBLE", "1")
        environment["COLUMNS"] = str(console.width - len("[0] "))
    return environment


@main.command()
@click.argument("file", type=_FILE)
def inspect(file: Path) -> None:
    """Print the value saved in FILE as text: a GraphItem, a Strategy or a ResourceSpec (binary, JSON or YAML)."""
    try:
        value = load_resource_spec(file) if file.suffix in YAML_SUFFIXES else load_value(file)
    except AutoDistError as error:
        raise click.ClickException(str(error)) from error
    Console(soft_wrap=True).print(str(value), markup=False, highlight=False)


if __name__ == "__main__":
    main(prog_name="autodist")
