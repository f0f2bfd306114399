"""Hosts on this machine, with a core and a shaped link each, and the training processes on them."""

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

import psutil

from benchmarks.systems import SYSTEMS, Worker
from tools.netlab import NETLAB

START_SECONDS, BLOCK_SECONDS, LAB_SECONDS, WIRE_SECONDS = 600.0, 300.0, 60.0, 3.0
_WIRE_PORT = 20_000
_ROOT = Path(__file__).resolve().parent.parent
BEFORE = ", before"
"""Follows the name of a system of ours that is run from another checkout."""


class BenchmarkError(Exception):
    """What is measured cannot be: it says why."""


class TrainingProcess:
    """One worker of a system on a host, which trains when told to."""

    def __init__(self, system: str, workload: str, worker: Worker, log: Path, checkout: Path):
        python = sys.executable if checkout == _ROOT else str(checkout / ".venv/bin/python")
        environment = {name: text for name, text in os.environ.items() if not name.startswith("AUTODIST_")}
        environment |= {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1"}
        environment |= SYSTEMS[system].environment(worker)
        what = [system, workload, str(worker.rank), str(worker.port), *worker.addresses]
        self._name, self._log = f"{system}, {workload}, host {worker.rank}", log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [NETLAB, "exec", str(worker.rank), python, "-m", "benchmarks.training_process", *what],
                cwd=checkout,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        self._input, self._output = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)

    def tell(self, line: str) -> None:
        """One line of its input."""
        try:
            self._input.write(f"{line}\n".encode())
            self._input.flush()
        except BrokenPipeError as error:
            raise self._failed("has ended") from error

    def answer(self, seconds: float) -> Any:
        """The next line of its output, read as JSON."""
        ready, _, _ = select.select([self._output], [], [], seconds)
        if not ready:
            raise self._failed(f"gave no answer in {seconds:g} s")
        line = self._output.readline()
        if not line:
            raise self._failed("has ended")
        return json.loads(line)

    def send(self, number: signal.Signals) -> None:
        """The process itself gets the signal, and with it the one that leads to its host."""
        process = psutil.Process(self._process.pid)
        for each in (*process.children(), process):
            with suppress(psutil.NoSuchProcess):
                each.send_signal(number)

    def close(self) -> None:
        """It is ended: what leads to its host is killed, and it with that."""
        self._process.kill()
        self._process.wait(LAB_SECONDS)

    def _failed(self, how: str) -> BenchmarkError:
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
        return BenchmarkError(f"the process of {self._name} {how}; the end of its log:\n{tail}")


class Group:
    """The processes of one system, one a host, with the code of that checkout."""

    def __init__(self, system: str, workload: str, hosts: int, port: int, folder: Path, checkout: Path = _ROOT):
        self._system = SYSTEMS[system]
        secret = secrets.token_hex(16)
        self._processes: list[TrainingProcess] = []
        for rank in range(1 if self._system.is_alone else hosts):
            worker = Worker(rank, [_address(host) for host in range(hosts)], port)
            log = folder / f"{port}-{workload}-{system.replace(' ', '-')}-{rank}.log"
            self._processes.append(TrainingProcess(system, workload, worker, log, checkout))
            if "AUTODIST_LAUNCH" in self._system.environment(worker):
                self._processes[-1].tell(secret)

    def first_losses(self) -> list[float]:
        """Those of its first steps, for the whole batches, or for what its hosts have of them."""
        losses = [process.answer(START_SECONDS) for process in self._processes]
        self._rest()
        return [sum(each) / len(each) for each in zip(*losses, strict=True)]

    def seconds_a_step(self, steps: int) -> float:
        """On the slower host, over so many steps."""
        if self._system.works_when_idle:
            for process in self._processes:
                process.send(signal.SIGCONT)
        for process in self._processes:
            process.tell(str(steps))
        seconds = [process.answer(BLOCK_SECONDS) for process in self._processes]
        self._rest()
        return float(max(seconds)) / steps

    def close(self) -> None:
        for process in self._processes:
            process.close()

    def _rest(self) -> None:
        if self._system.works_when_idle:
            for process in self._processes:
                process.send(signal.SIGSTOP)


def _address(host: int) -> str:
    return f"10.77.0.{host + 1}"


@contextmanager
def lab(hosts: int) -> Iterator[None]:
    """Within it so many hosts are there, their links not shaped.

    Raises:
        BenchmarkError: it cannot be made.
    """
    _netlab("up", str(hosts), "none", NETLAB_PIN="1")
    try:
        yield
    finally:
        _netlab("down")


def shape(rate: str) -> None:
    """From now on every link has that rate, or none at all."""
    _netlab("shape", rate)


def sent_bytes() -> list[int]:
    """What each host has sent so far."""
    return [int(line.split()[1]) for line in _netlab("bytes").splitlines()]


def wire_rate() -> float:
    """Bytes a second that arrive on the slower one of two hosts while both send all they can."""
    command = [sys.executable, "-m", "benchmarks.wire"]
    where = [str(_WIRE_PORT), str(WIRE_SECONDS), _address(0)]
    processes = [
        subprocess.Popen(
            [NETLAB, "exec", str(rank), *command, str(rank), *where], cwd=_ROOT, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        return min(float(process.communicate(timeout=LAB_SECONDS)[0]) for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.wait(LAB_SECONDS)


@contextmanager
def groups(
    systems: Sequence[str], workload: str, hosts: int, folder: Path, before: Path | None = None
) -> Iterator[Mapping[str, Group]]:
    """Within it the processes of all these systems are there; `before` is the checkout of those named `BEFORE`."""
    started: dict[str, Group] = {}
    try:
        for number, system in enumerate(systems):
            checkout = before if before is not None and system.endswith(BEFORE) else _ROOT
            port = _WIRE_PORT + 10 * (number + 1)
            started[system] = Group(system.removesuffix(BEFORE), workload, hosts, port, folder, checkout)
        yield started
    finally:
        for group in started.values():
            group.close()
        time.sleep(0.1)


def _netlab(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [NETLAB, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=LAB_SECONDS,
        check=False,
    )
    if done.returncode:
        raise BenchmarkError(done.stderr.strip() or f"netlab.sh {arguments[0]} failed")
    return done.stdout
