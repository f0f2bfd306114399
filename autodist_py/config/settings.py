"""`Settings`: what the environment says about this process, checked, and read once.

Every variable is named AUTODIST_*. What a user's script may choose is an argument of `AutoDist`, not a setting. Values
are checked by pydantic; not by pydantic-settings, whose models read the environment whenever one is made.
"""

import os
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from autodist_py.proto.checks import MAX_SECONDS
from autodist_py.proto.errors import AutoDistError

RANK_VARIABLE = "AUTODIST_RANK"
COORDINATOR_VARIABLE = "AUTODIST_COORDINATOR"
COORDINATOR_IS_TOLD = "told:0"
"""The coordinator of a worker that is told the address over its standard input."""
RESOURCE_SPEC_VARIABLE = "AUTODIST_RESOURCE_SPEC"
WORKER_OUTPUT_VARIABLE = "AUTODIST_WORKER_OUTPUT"
PROGRESS_VARIABLE = "AUTODIST_PROGRESS"
EARLY_WORKERS_VARIABLE = "AUTODIST_EARLY_WORKERS"
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

WORKER_VARIABLES = (
    RANK_VARIABLE,
    COORDINATOR_VARIABLE,
    WORKER_OUTPUT_VARIABLE,
    PROGRESS_VARIABLE,
    EARLY_WORKERS_VARIABLE,
)
"""What belongs to one process of one run, and must not be inherited by another run."""

OWN_VARIABLES = (
    WORKER_OUTPUT_VARIABLE,
    PROGRESS_VARIABLE,
    EARLY_WORKERS_VARIABLE,
    PLAN_DIR_VARIABLE,
    RECORD_DIR_VARIABLE,
    RECORD_STEPS_VARIABLE,
    RECORDED_RUN_VARIABLE,
)
"""What the command line tells the processes that it starts, and nobody else sets."""

_MOST_INTEGER = 2**31 - 1
_MOST_PORT = 65535


class SettingsError(AutoDistError, ValueError):
    """An environment variable AUTODIST_* has a value that cannot be used."""


def _is(rule: str) -> WrapValidator:
    """A value that pydantic refuses is answered with the rule, of which its own words are a part at most."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value.strip() if isinstance(value, str) else value)
        except ValidationError as error:
            raise PydanticCustomError("rule", "{rule}", {"rule": rule}) from error

    return WrapValidator(check)


def _whole(least: int = 0, most: int = _MOST_INTEGER) -> Any:
    return Field(ge=least, le=most), _is(f"a whole number from {least} to {most}")


def _seconds(least: float) -> Any:
    rule = f"a number of seconds, {least:g} or more, and at most {MAX_SECONDS}"
    return Field(ge=least, le=MAX_SECONDS, allow_inf_nan=False), _is(rule)


_HOST_AND_PORT = re.compile(r"(?s).+:(\d{1,5})", re.ASCII)


def _host_and_port(text: str) -> str:
    match = _HOST_AND_PORT.fullmatch(text)
    if match is None or int(match[1]) > _MOST_PORT:
        raise ValueError("no port")
    return text


Whole = Annotated[int, *_whole()]
Count = Annotated[int, *_whole(1)]
Port = Annotated[int, *_whole(0, _MOST_PORT)]
Seconds = Annotated[float, *_seconds(0.1)]
Patience = Annotated[float, *_seconds(2.0)]
Address = Annotated[str, AfterValidator(_host_and_port), _is("host:port")]
LogLevel = Annotated[
    Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"],
    BeforeValidator(str.upper),
    _is("one of DEBUG, INFO, WARNING, ERROR, CRITICAL"),
]
LostWorkers = Annotated[Literal["end", "continue"], _is("one of end, continue")]
Launch = Annotated[Literal["auto", "none"], _is("one of auto, none")]
Output = Annotated[Literal["brief", "all"], _is("one of brief, all")]
RecordedRun = Annotated[Literal["plain", "compiled", "ops"], _is("one of plain, compiled, ops")]


@dataclass(frozen=True, slots=True)
class Settings:
    """The environment of one process: the variable of a field is AUTODIST_ and its name. Times are in seconds.

    docs/settings.md is made of the fields' texts, by tools/generate_docs.py.
    """

    rank: Whole | None = None
    """The rank of a worker that you start by hand, 1 or more. The chief has none."""

    coordinator: Address | None = None
    """The chief's address for such a worker, as `host:port`."""

    resource_spec: Path | None = None
    """The file of the resource spec, where the script names none."""

    worker_output: Whole | None = None
    """A file descriptor for the other workers' lines. In another worker it is for its last line, when the chief is
    lost."""

    dump_dir: Path | None = None
    """A folder for the text of each program after each pass of the compiler."""

    log_level: LogLevel | None = None
    """From which level on all workers log: DEBUG, INFO, WARNING, ERROR or CRITICAL. INFO tells what was compiled, and
    from where a run goes on. A worker's own lines need `AUTODIST_OUTPUT=all`."""

    join_timeout: Seconds = 120.0
    """How many seconds all workers have to reach `AutoDist(...)`."""

    heartbeat_timeout: Patience = 5.0
    """After how many seconds of silence a worker is taken for lost, 2 or more. An SSH connection that is silent for
    twice as long ends the run, too. `AllReduce(timeout_seconds=...)` shortens it for steps that wait, and must be
    longer than what one worker does alone between two steps."""

    lost_workers: LostWorkers = "end"
    """Whether a run ends (`end`) or goes on (`continue`) when a worker fails that the others can do without. Where
    workers take their steps by themselves, that is one that is neither the chief nor a server."""

    exit_grace: Seconds = 2.5
    """How many seconds a worker has to end by itself when the run has failed."""

    coordinator_port: Port = 0
    """The coordinator's port on the chief; 0: any free one."""

    server_port: Port = 0
    """The port of TensorFlow's server on rank 0; rank r takes this number + r. 0: any free ones."""

    checked_steps: Whole = 10
    """For how many steps the workers compare what they are given, with `batch="global"`."""

    seed: Whole | None = None
    """The seed of random numbers, where the script gives none."""

    strategy: str | None = None
    """The strategy builder, whatever the script says."""

    plan_dir: Path | None = None
    """Where the plan of the first program that trains is written; the script ends then."""

    record_dir: Path | None = None
    """Where the values of a recorded run's first steps are written; the script ends then."""

    record_steps: Count = 3
    """How many steps are recorded."""

    recorded_run: RecordedRun = "compiled"
    """What is recorded: your own code on one device (`plain`), what is compiled of it (`compiled`), or that with the
    values of its ops (`ops`)."""

    ssh_config: Path | None = None
    """The configuration file of ssh, in the place of yours and the system's."""

    launch: Launch = "auto"
    """`none`: the chief starts no worker; a scheduler does, or you. `AUTODIST_COORDINATOR_PORT` must be given then. The
    other processes have it, too, and wait for the chief."""

    timeline: Path | None = None
    """The file for the trace of a few steps."""

    output: Output = "brief"
    """What is shown of the other workers' lines: what went wrong (`brief`), or `all`."""

    kept_programs: Count = 100
    """How many programs of a step, or session, are kept, one for each signature of its calls. What was not used for
    longest goes, and is compiled anew if it is called again. A program that keeps something itself, such as a table,
    stays."""

    progress: Whole | None = None
    """A file descriptor for the chief's step."""

    early_workers: Whole | None = None
    """A file descriptor for the chief's words to `autodist run`, which has started the other workers with it."""

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

    @property
    def is_launched(self) -> bool:
        """Whether the chief, or `autodist run`, has started this process as another worker, and tells it the rest."""
        return self.rank is not None and self.launch != "none"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "Settings":
        """The settings of `environment` (default: this process's).

        Raises:
            SettingsError: it names the variable, its value and what is allowed.
        """
        source = os.environ if environment is None else environment
        named = {field.name: source.get(_variable(field.name), "") for field in fields(cls)}
        given = {name: text for name, text in named.items() if text.strip()}
        try:
            return _adapter().validate_python(given)
        except ValidationError as error:
            raise _refusal(error, given) from error


@cache
def _adapter() -> TypeAdapter[Settings]:
    return TypeAdapter(Settings)


def _variable(name: str) -> str:
    return f"AUTODIST_{name.upper()}"


def _refusal(error: ValidationError, given: Mapping[str, str]) -> SettingsError:
    """The first thing that is wrong: a value, or two that do not go together."""
    first = error.errors()[0]
    own = first.get("ctx", {}).get("error")
    if isinstance(own, SettingsError):
        return own
    name = str(first["loc"][0])
    return SettingsError(f"{_variable(name)} is {first['msg']}. Received: {reprlib.repr(given[name].strip())}.")
