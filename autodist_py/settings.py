"""`Settings`: what the environment says about this process, checked, and read once.

Every variable is named AUTODIST_*. What a user's script may choose is an argument of `AutoDist`, not a setting.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autodist_py.proto.checks import MAX_SECONDS
from autodist_py.proto.errors import AutoDistError

RANK_VARIABLE = "AUTODIST_RANK"
COORDINATOR_VARIABLE = "AUTODIST_COORDINATOR"
RESOURCE_SPEC_VARIABLE = "AUTODIST_RESOURCE_SPEC"
WORKER_OUTPUT_VARIABLE = "AUTODIST_WORKER_OUTPUT"
PROGRESS_VARIABLE = "AUTODIST_PROGRESS"
DUMP_DIR_VARIABLE = "AUTODIST_DUMP_DIR"
LOG_LEVEL_VARIABLE = "AUTODIST_LOG_LEVEL"
OUTPUT_VARIABLE = "AUTODIST_OUTPUT"
JOIN_TIMEOUT_VARIABLE = "AUTODIST_JOIN_TIMEOUT"
HEARTBEAT_TIMEOUT_VARIABLE = "AUTODIST_HEARTBEAT_TIMEOUT"
LOST_WORKERS_VARIABLE = "AUTODIST_LOST_WORKERS"
EXIT_GRACE_VARIABLE = "AUTODIST_EXIT_GRACE"
COORDINATOR_PORT_VARIABLE = "AUTODIST_COORDINATOR_PORT"
SERVER_PORT_VARIABLE = "AUTODIST_SERVER_PORT"
SSH_CONFIG_VARIABLE = "AUTODIST_SSH_CONFIG"
LAUNCH_VARIABLE = "AUTODIST_LAUNCH"
CHECKED_STEPS_VARIABLE = "AUTODIST_CHECKED_STEPS"
SEED_VARIABLE = "AUTODIST_SEED"
STRATEGY_VARIABLE = "AUTODIST_STRATEGY"
TIMELINE_VARIABLE = "AUTODIST_TIMELINE"
PLAN_DIR_VARIABLE = "AUTODIST_PLAN_DIR"
RECORD_DIR_VARIABLE = "AUTODIST_RECORD_DIR"
RECORD_STEPS_VARIABLE = "AUTODIST_RECORD_STEPS"
RECORDED_RUN_VARIABLE = "AUTODIST_RECORDED_RUN"
KEPT_PROGRAMS_VARIABLE = "AUTODIST_KEPT_PROGRAMS"

WORKER_VARIABLES = (RANK_VARIABLE, COORDINATOR_VARIABLE, WORKER_OUTPUT_VARIABLE, PROGRESS_VARIABLE)
"""What belongs to one process of one run, and must not be inherited by another run."""

OWN_VARIABLES = (
    WORKER_OUTPUT_VARIABLE,
    PROGRESS_VARIABLE,
    PLAN_DIR_VARIABLE,
    RECORD_DIR_VARIABLE,
    RECORD_STEPS_VARIABLE,
    RECORDED_RUN_VARIABLE,
)
"""What the command line tells the processes that it starts, and nobody else sets."""

RECORDED_RUNS = ("plain", "compiled", "ops")
"""The user's own code on one device; what is compiled of it; the same with the values of its ops."""

LOST_WORKERS = ("end", "continue")
"""What a run does when a worker fails that the others can do without."""

LAUNCH = ("auto", "none")
"""Whether the chief starts the other workers, or each process is started by hand."""

OUTPUT = ("brief", "all")
"""What is shown of the other workers' output: what went wrong, or all; and whether TensorFlow's start is."""

_MOST_PORT = 65535

_MOST_DIGITS = 18
"""Python makes no number of a text of thousands."""

_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class SettingsError(AutoDistError, ValueError):
    """An environment variable AUTODIST_* has a value that cannot be used."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The environment of one process: the variable of a field is AUTODIST_ and its name. Times are in seconds.

    docs/settings.md is made of the fields' texts, by tools/generate_docs.py.
    """

    rank: int | None = None
    """The rank of a worker that you start by hand, 1 or more. The chief has none."""

    coordinator: str | None = None
    """The chief's address for such a worker, as `host:port`."""

    resource_spec: Path | None = None
    """The file of the resource spec, where the script names none."""

    worker_output: int | None = None
    """A file descriptor for the other workers' lines. In another worker it is for its last line, when the chief is
    lost."""

    dump_dir: Path | None = None
    """A folder for the text of each program after each pass of the compiler."""

    log_level: str | None = None
    """From which level on all workers log: DEBUG, INFO, WARNING, ERROR or CRITICAL. INFO tells what was compiled, and
    from where a run goes on. A worker's own lines need `AUTODIST_OUTPUT=all`."""

    join_timeout: float = 120.0
    """How many seconds all workers have to reach `AutoDist(...)`."""

    heartbeat_timeout: float = 5.0
    """After how many seconds of silence a worker is taken for lost, 2 or more. An SSH connection that is silent for
    twice as long ends the run, too. `AllReduce(timeout_seconds=...)` shortens it for steps that wait, and must be
    longer than what one worker does alone between two steps."""

    lost_workers: str = "end"
    """Whether a run ends (`end`) or goes on (`continue`) when a worker fails that the others can do without. Where
    workers take their steps by themselves, that is one that is neither the chief nor a server."""

    exit_grace: float = 2.5
    """How many seconds a worker has to end by itself when the run has failed."""

    coordinator_port: int = 0
    """The coordinator's port on the chief; 0: any free one."""

    server_port: int = 0
    """The port of TensorFlow's server on rank 0; rank r takes this number + r. 0: any free ones."""

    checked_steps: int = 10
    """For how many steps the workers compare what they are given, with `batch="global"`."""

    seed: int | None = None
    """The seed of random numbers, where the script gives none."""

    strategy: str | None = None
    """The strategy builder, whatever the script says."""

    plan_dir: Path | None = None
    """Where the plan of the first program that trains is written; the script ends then."""

    record_dir: Path | None = None
    """Where the values of a recorded run's first steps are written; the script ends then."""

    record_steps: int = 3
    """How many steps are recorded."""

    recorded_run: str = "compiled"
    """What is recorded: your own code on one device (`plain`), what is compiled of it (`compiled`), or that with the
    values of its ops (`ops`)."""

    ssh_config: Path | None = None
    """The configuration file of ssh, in the place of yours and the system's."""

    launch: str = "auto"
    """`none`: the chief starts no worker; a scheduler does, or you. `AUTODIST_COORDINATOR_PORT` must be given then. The
    other processes have it, too, and wait for the chief."""

    timeline: Path | None = None
    """The file for the trace of a few steps."""

    output: str = "brief"
    """What is shown of the other workers' lines: what went wrong (`brief`), or `all`."""

    kept_programs: int = 100
    """How many programs of a step, or session, are kept, one for each signature of its calls. What was not used for
    longest goes, and is compiled anew if it is called again. A program that keeps something itself, such as a table,
    stays."""

    progress: int | None = None
    """A file descriptor for the chief's step."""

    def __post_init__(self) -> None:
        if (self.rank is None) != (self.coordinator is None):
            raise SettingsError(
                f"{RANK_VARIABLE} and {COORDINATOR_VARIABLE} are set together, for workers other than the chief. "
                f"Received: {RANK_VARIABLE}={self.rank}, {COORDINATOR_VARIABLE}={self.coordinator}. "
                "Unset both: `python train.py` is the chief and starts the other workers."
            )
        if self.rank == 0:
            raise SettingsError(
                f"{RANK_VARIABLE} is 1 or more: rank 0 is the chief, which runs without it. Unset {RANK_VARIABLE}."
            )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "Settings":
        """The settings of `environment` (default: this process's).

        Raises:
            SettingsError: it names the variable, its value and what is allowed.
        """
        source = os.environ if environment is None else environment
        given = {name: text for name, text in source.items() if text.strip()}
        defaults = cls()
        return cls(
            rank=_integer(given, RANK_VARIABLE, None, most=2**31 - 1),
            coordinator=_address(given, COORDINATOR_VARIABLE),
            resource_spec=_path(given, RESOURCE_SPEC_VARIABLE),
            worker_output=_integer(given, WORKER_OUTPUT_VARIABLE, None, most=2**31 - 1),
            progress=_integer(given, PROGRESS_VARIABLE, None, most=2**31 - 1),
            dump_dir=_path(given, DUMP_DIR_VARIABLE),
            log_level=_log_level(given, LOG_LEVEL_VARIABLE),
            output=_choice(given, OUTPUT_VARIABLE, OUTPUT, defaults.output),
            join_timeout=_seconds(given, JOIN_TIMEOUT_VARIABLE, defaults.join_timeout),
            heartbeat_timeout=_seconds(given, HEARTBEAT_TIMEOUT_VARIABLE, defaults.heartbeat_timeout, least=2.0),
            lost_workers=_choice(given, LOST_WORKERS_VARIABLE, LOST_WORKERS, defaults.lost_workers),
            exit_grace=_seconds(given, EXIT_GRACE_VARIABLE, defaults.exit_grace),
            coordinator_port=_integer(given, COORDINATOR_PORT_VARIABLE, 0, most=_MOST_PORT) or 0,
            server_port=_integer(given, SERVER_PORT_VARIABLE, 0, most=_MOST_PORT) or 0,
            ssh_config=_path(given, SSH_CONFIG_VARIABLE),
            timeline=_path(given, TIMELINE_VARIABLE),
            launch=_choice(given, LAUNCH_VARIABLE, LAUNCH, defaults.launch),
            checked_steps=_integer(given, CHECKED_STEPS_VARIABLE, defaults.checked_steps, most=2**31 - 1) or 0,
            seed=_integer(given, SEED_VARIABLE, None, most=2**31 - 1),
            strategy=given.get(STRATEGY_VARIABLE),
            plan_dir=_path(given, PLAN_DIR_VARIABLE),
            record_dir=_path(given, RECORD_DIR_VARIABLE),
            record_steps=_integer(given, RECORD_STEPS_VARIABLE, defaults.record_steps, most=2**31 - 1) or 1,
            recorded_run=_choice(given, RECORDED_RUN_VARIABLE, RECORDED_RUNS, defaults.recorded_run),
            kept_programs=_integer(given, KEPT_PROGRAMS_VARIABLE, None, most=2**31 - 1) or defaults.kept_programs,
        )


def _integer(given: Mapping[str, str], name: str, default: int | None, *, most: int) -> int | None:
    if name not in given:
        return default
    text = given[name].strip()
    if not (text.isascii() and text.isdigit()) or len(text) > _MOST_DIGITS or int(text) > most:
        raise SettingsError(f"{name} is a whole number from 0 to {most}. Received: {text!r}.")
    return int(text)


def _seconds(given: Mapping[str, str], name: str, default: float, *, least: float = 0.1) -> float:
    if name not in given:
        return default
    text = given[name].strip()
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= MAX_SECONDS:
        raise SettingsError(
            f"{name} is a number of seconds, {least:g} or more, and at most {MAX_SECONDS}. Received: {text!r}."
        )
    return value


def _address(given: Mapping[str, str], name: str) -> str | None:
    if name not in given:
        return None
    text = given[name].strip()
    host, _, port = text.rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > _MOST_PORT:
        raise SettingsError(f"{name} is host:port. Received: {text!r}.")
    return text


def _path(given: Mapping[str, str], name: str) -> Path | None:
    return Path(given[name]) if name in given else None


def _log_level(given: Mapping[str, str], name: str) -> str | None:
    return _choice({name: given[name].upper()}, name, _LOG_LEVELS, "") if name in given else None


def _choice(given: Mapping[str, str], name: str, choices: Sequence[str], default: str) -> str:
    choice = given.get(name, default).strip()
    if name in given and choice not in choices:
        raise SettingsError(f"{name} is one of {', '.join(choices)}. Received: {given[name]!r}.")
    return choice
