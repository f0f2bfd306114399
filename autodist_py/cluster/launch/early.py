"""Workers that start together with the chief, under `autodist run`, and wait until it comes to `AutoDist(...)`.

So all import TensorFlow at once. Their scripts begin when the chief's is there, as where workers are started by it:
what a script does before, such as a download, has been done once when they come to it. If it never is there, they end,
as their standard input does.
"""

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

from autodist_py.cluster.launch.local import wait_locally
from autodist_py.cluster.launch.ssh import wait_over_ssh
from autodist_py.cluster.launch.waiting import Waiting
from autodist_py.config.resource_spec import load_resource_spec
from autodist_py.config.settings import Settings
from autodist_py.proto.errors import AutoDistError
from autodist_py.proto.resource_spec import ResourceSpec

_IMPORTED = ("tensorflow", "autodist_py.autodist")
"""What takes long to import; in this order, where the second begins with the first."""


class _Early(MetaPathFinder):
    """The processes that wait, by rank, on the nodes of a resource spec. It sees all imports, and finds nothing."""

    def __init__(self, resources: ResourceSpec) -> None:
        self.resources = resources
        self.processes: dict[int, Waiting] = {}
        self._told = 0

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """This process begins to import a module: if it takes long, those that wait do so, too."""
        if fullname in _IMPORTED:
            for module in _IMPORTED[self._told : _IMPORTED.index(fullname) + 1]:
                self._told += 1
                for waiting in self.processes.values():
                    waiting.imports(module)

    def end(self) -> None:
        """None waits any more."""
        for waiting in self.processes.values():
            waiting.end()
        self.processes.clear()


_of_process: list[_Early] = []
"""The one, if there is any."""


def start_workers() -> None:
    """The processes of all other workers of `autodist run` have started, each for a script like this process's.

    What is wrong with a setting, the spec, or the way to a node is said when the script comes to AutoDist.
    """
    try:
        settings = Settings.from_environment()
        if settings.resource_spec is None or settings.launch == "none" or settings.plan_dir is not None:
            return
        early = _Early(load_resource_spec(settings.resource_spec))
        _of_process.append(early)
        os.register_at_fork(after_in_child=early.processes.clear)  # They are not that process's to tell.
        sys.meta_path.insert(0, early)
        command, folder = [sys.executable, *sys.orig_argv[1:]], os.getcwd()
        for rank, node in enumerate(early.resources.workers):
            if not rank:
                continue
            if early.resources.is_local:
                waiting = wait_locally(rank, command, folder, settings.worker_output)
            else:
                waiting = wait_over_ssh(rank, node, early.resources, settings, command, folder)
            early.processes[rank] = waiting
    except AutoDistError:
        for early in _of_process:
            early.end()


def waiting_for(resources: ResourceSpec) -> dict[int, Waiting]:
    """The processes that wait for a job on these nodes, by rank; those of other nodes are ended."""
    found: dict[int, Waiting] = {}
    for early in _of_process:
        if resources != early.resources:
            early.end()
        found = dict(early.processes)
        early.processes.clear()
    return found
