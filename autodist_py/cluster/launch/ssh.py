"""Workers on other hosts, each started by the user's own `ssh` client, with its configuration, keys and known hosts.

It owns the way there: ssh's options, what the host's shell is told, and the words for what went wrong. Ending a worker
is the task of `agent.py`, which is what ssh runs.
"""

import os
import re
import shlex
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, cast

from autodist_py.cluster.launch.agent import ALIVE, SIGNAL, STARTED, TOLD
from autodist_py.cluster.launch.local import (
    Command,
    ExitReport,
    Launcher,
    LineOutput,
    LocalLauncher,
    WatchedProcess,
    own_variables,
)
from autodist_py.cluster.launch.told import Told
from autodist_py.config.settings import (
    EARLY_WORKERS_VARIABLE,
    PROGRESS_VARIABLE,
    RESOURCE_SPEC_VARIABLE,
    SSH_CONFIG_VARIABLE,
    WORKER_OUTPUT_VARIABLE,
    Settings,
)
from autodist_py.proto.errors import ClusterError
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec, SSHConfig

_CONNECT_SECONDS = 10
_KILL_SECONDS = 0.5
_MARGIN_SECONDS = 1.0
_ALIVE_LINES = 8
"""How many lines a worker's host is sent in the time in which it must hear of us."""
_SSH_FAILED = 255
_SHOWN_LINES = 6
_REASON_LINES = 2
"""How many lines are why no worker has started: those before may be what the host greets everyone with."""

_GREETING_LINES = 50

_PASSED_PREFIXES = ("AUTODIST_", "TF_", "KERAS_", "XLA_", "NCCL_", "GRPC_", "HOROVOD_")
_PASSED_NAMES = ("PYTHONPATH", "PYTHONHASHSEED", "PYTHONWARNINGS")
_NOT_PASSED = (
    WORKER_OUTPUT_VARIABLE,
    PROGRESS_VARIABLE,
    EARLY_WORKERS_VARIABLE,
    SSH_CONFIG_VARIABLE,
    RESOURCE_SPEC_VARIABLE,
    "TF_CONFIG",
    "HOROVOD_GLOO_IFACE",
)
"""What is of the chief's process alone, though its name would have it passed on. The spec itself is told."""

# The only words for the user's login shell, whichever it is. What is to be done comes over standard input, where no
# other user of the host sees it.
_READ_AND_DO = "exec sh -c 'IFS= read -r line && eval \"$line\"'"


def launcher_on(
    resources: ResourceSpec,
    settings: Settings,
    command: Command,
    output: LineOutput,
    *,
    last_words_descriptor: int | None = None,
) -> Launcher:
    """What starts the command on these nodes; workers of this machine are given the descriptor for last words."""
    if resources.is_local:
        return LocalLauncher(command, output, last_words_descriptor=last_words_descriptor)
    return SshLauncher(command, output, resources, settings)


class SshLauncher:
    """Workers as processes of other hosts: the same command, in the folder of the same name.

    Each `ssh` is a session of its own, as Ctrl-C at a terminal is for the chief alone.
    """

    def __init__(self, command: Command, output: LineOutput, resources: ResourceSpec, settings: Settings) -> None:
        self._command, self._output = command, output
        self._resources = resources
        self._settings = settings

    def launch(self, rank: int, node: NodeSpec, *, on_exit: ExitReport) -> "SshWorker":
        """See Launcher. Standard input stays open after what the worker is told: its end tells of the chief's.

        Raises:
            ClusterError: there is no ssh client, or not the key that it is to use.
        """
        config = self._resources.ssh_config(node)
        client = ssh_command(node, config, self._settings)
        python, *options = self._command.line
        python = f"{config.python_venv}/bin/python" if config.python_venv else python
        # A worker that notices the chief's end by itself has so long to end by itself.
        grace = self._settings.heartbeat_timeout + self._settings.exit_grace + _MARGIN_SECONDS
        # Twice as long as ssh takes here to see that the link is dead: whoever starts workers may stand still.
        silence = 4 * self._settings.heartbeat_timeout
        script = shell_script(
            self._command.folder,
            remote_environment(self._command.environment, rank, config),
            venv=config.python_venv,
            command=[python, "-m", "autodist_py.cluster.launch.agent", f"{grace:g}", f"{silence:g}", *options],
        )
        try:
            process = subprocess.Popen(
                [*client, _READ_AND_DO],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise ClusterError(
                f"workers on other machines are started by the program `ssh`. Received: {node.address} as the node "
                f"of rank {rank}, and no `ssh` on the PATH of this machine. Install an OpenSSH client."
            ) from error
        needs = f"the folder {self._command.folder} and {python}, which has autodist_py"
        worker = SshWorker(rank, process, self._output, on_exit, client=client, needs=needs)
        worker.send(os.fsencode(f"{script}\n"))
        worker.say_alive(silence / _ALIVE_LINES)
        return worker


class SshWorker:
    """One worker on another host, behind its ssh client. It implements LaunchedWorker."""

    def __init__(
        self,
        rank: int,
        process: "subprocess.Popen[bytes]",
        output: LineOutput,
        on_exit: ExitReport,
        *,
        client: Sequence[str],
        needs: str,
    ) -> None:
        self.rank = rank
        self._process = process
        self._output = output
        self._on_exit = on_exit
        self._client, self._needs = client, needs
        self._has_started = False
        self._is_told = threading.Event()
        self._sending = threading.Lock()
        self._said: deque[str] = deque(maxlen=_SHOWN_LINES)
        self._before: deque[bytes] = deque(maxlen=_GREETING_LINES)
        """What was said before a worker started; it is shown if none does."""
        self._watched = WatchedProcess(
            process,
            name=f"autodist-worker-{rank}",
            readers=[lambda: output.relay(rank, cast(IO[bytes], process.stdout)), self._listen],
            on_exit=self._report,
        )

    def say_alive(self, seconds: float) -> None:
        """Let the worker's host know, so often, that this process is there, until the worker is told."""
        threading.Thread(
            target=self._say_alive, args=[seconds], name=f"autodist-alive-{self.rank}", daemon=True
        ).start()

    def _say_alive(self, seconds: float) -> None:
        while not self._is_told.wait(seconds) and self._process.returncode is None:
            with suppress(OSError, ValueError):  # It may have ended meanwhile.
                self.send(ALIVE)

    def tell(self, told: Told) -> None:
        """See LaunchedWorker."""
        self._is_told.set()
        self.send(TOLD + told.line())

    def wait(self, timeout: float) -> int | None:
        """See LaunchedWorker."""
        code = self._watched.wait(timeout)
        return None if code is None else _worker_code(code)

    def terminate(self) -> None:
        """See LaunchedWorker. On its host the group is signalled, so what the script started itself ends too."""
        self.send(SIGNAL + b"SIGTERM\n")

    def kill(self) -> None:
        """See LaunchedWorker. As with `terminate`; a host that does not answer ends the worker by itself later."""
        timer = threading.Timer(_KILL_SECONDS, self._end_client)
        timer.daemon = True
        timer.start()
        self.send(SIGNAL + b"SIGKILL\n")

    def send(self, text: bytes) -> None:
        """Writes to the standard input of what ssh runs."""
        descriptor = cast(IO[bytes], self._process.stdin).fileno()
        with self._sending, suppress(BrokenPipeError):
            while text:
                text = text[os.write(descriptor, text) :]

    def _end_client(self) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()

    def _listen(self) -> None:
        """Standard error is what shells and ssh say; workers write to standard output only."""
        with cast(IO[bytes], self._process.stderr) as source:
            for line in source:
                if line.endswith(STARTED):
                    self._has_started = True
                    self._said.clear()
                    continue
                if text := line.decode(errors="replace").strip():
                    self._said.append(text)
                if self._has_started:
                    self._output.show(self.rank, line)
                else:
                    self._before.append(line)

    def _report(self, code: int) -> None:
        if not self._has_started:  # The stream may not be at its end: what ssh has started may hold it open.
            for line in list(self._before):
                self._output.show(self.rank, line)
        is_shown = self._output.ended(self.rank, _worker_code(code))
        self._on_exit(self.rank, _worker_code(code), self._reason(code), is_shown)

    def _reason(self, code: int) -> str:
        said = " / ".join(self._said)
        if not self._has_started:
            said = " / ".join(list(self._said)[-_REASON_LINES:]) or f"exit code {code}"
            return (
                f"it could not be started over SSH: {said}. `{shlex.join(self._client)}` must come to that host's "
                f"shell without a question, and there must be {self._needs}"
            )
        if code < 0:
            return f"its ssh client, on the chief's machine, was killed by {signal.Signals(-code).name}"
        if code == _SSH_FAILED and said:
            return f"its SSH connection broke: {said}"
        return ""


def _worker_code(code: int) -> int:
    """The exit code that ssh gives, with a signal told as of a process of our own."""
    return 128 - code if 128 < code <= 128 + signal.NSIG else code


def ssh_command(node: NodeSpec, config: SSHConfig, settings: Settings) -> list[str]:
    """The ssh client and its arguments, up to the host; what is not said here the user's configuration says.

    Raises:
        ClusterError: the key file is not there.
    """
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": str(_CONNECT_SECONDS),
        # It keeps what is silent for hours open. After twice the interval without an answer ssh ends, and says so as an
        # information, no error: before a worker has joined nothing else sees a dead link. Then its heartbeat sees one
        # earlier; but heartbeats may take another way, so a run also ends if only ssh's connection stands still.
        "ServerAliveInterval": str(max(1, round(settings.heartbeat_timeout))),
        "ServerAliveCountMax": "1",
        "LogLevel": "INFO",
        "RemoteCommand": "none",
        "ControlMaster": "no",  # A connection that outlives us would hold our pipes open.
        "ClearAllForwardings": "yes",
        "ForwardAgent": "no",
        "ForwardX11": "no",
    }
    command = ["ssh", "-T"]
    if settings.ssh_config is not None:
        command += ["-F", str(settings.ssh_config)]
    if config.username:
        command += ["-l", config.username]
    if config.port != SSHConfig().port:
        command += ["-p", str(config.port)]
    if config.key_file is not None:
        key = Path(config.key_file).expanduser()
        if not key.is_file():
            raise ClusterError(
                f"the key_file of an ssh group is a file of the chief's machine. Received: {config.key_file} for "
                f"{node.address}, which is not there. Correct it, or leave it out: then ssh's own configuration says."
            )
        command += ["-i", str(key)]
        options["IdentitiesOnly"] = "yes"
    for name, value in options.items():
        command += ["-o", f"{name}={value}"]
    return [*command, node.address]


def remote_environment(environment: Mapping[str, str], rank: int, config: SSHConfig) -> dict[str, str]:
    """What a worker on another host is given beside that host's own environment.

    Settings of autodist_py, TensorFlow, Keras and what they communicate by are the chief's, as all workers must
    agree; what depends on the machine (paths of libraries, devices) is the host's own, or in `shared_envs`.
    """
    passed = {
        name: value
        for name, value in environment.items()
        if (name.startswith(_PASSED_PREFIXES) or name in _PASSED_NAMES)
        and name not in _NOT_PASSED
        and re.fullmatch(r"\w+", name, re.ASCII)
    }
    return passed | dict(config.shared_envs) | own_variables(rank)


def shell_script(folder: str, environment: Mapping[str, str], *, venv: str | None, command: Sequence[str]) -> str:
    """One line for a POSIX shell: it becomes `command`, in the folder, with these variables, and the venv active."""
    exports = [f"{name}={_quoted(value)}" for name, value in environment.items()]
    if venv is not None:
        exports += [f"VIRTUAL_ENV={_quoted_path(venv)}", f'PATH={_quoted_path(venv)}/bin:"$PATH"']
    words = " ".join([_quoted_path(command[0]), *map(_quoted, command[1:])])
    return f"n=$(printf '\\nx') && n=${{n%x}} && cd {_quoted(folder)} && export {' '.join(exports)} && exec {words}"


def _quoted(text: str) -> str:
    return shlex.quote(text).replace("\n", "'\"$n\"'")  # The shell reads one line.


def _quoted_path(path: str) -> str:
    """`~` is the home folder on the host."""
    return f'"$HOME"/{_quoted(path[2:])}' if path.startswith("~/") else _quoted(path)
