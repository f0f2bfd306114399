"""What Python runs before the script of a run's process: the chief starts workers, a worker imports TensorFlow.

Python imports a module of this name when it starts, from the folders of PYTHONPATH, too. So the script runs as ever: it
is `__main__`, with its own arguments. That of a worker begins when the chief has come to `AutoDist(...)`, as if the
worker were started then; but what takes long to import has been imported by then.

The chief tells a worker over standard input, in lines of JSON, what it does itself: it `imports` a module, or, null,
has a job, where the script begins. Each line has the `changes` of the environment, null where a variable is gone.
TensorFlow is imported without waiting for the word. If the chief's environment is another by then than at its start,
the process becomes a new one of the same command, with that environment: what an import reads of it is not known.
"""

import gc
import importlib
import json
import os
import queue
import sys
import threading
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

_OWN_FOLDER = str(Path(__file__).resolve().parent)
_PATH_VARIABLE = "PYTHONPATH"
_RANK_VARIABLE = "AUTODIST_RANK"
_FIRST_IMPORTED = "tensorflow"


def _leave_the_path() -> None:
    """What the script starts has PYTHONPATH as it was, and this process the `sitecustomize` that it would have."""
    folders = os.environ[_PATH_VARIABLE].split(os.pathsep)
    folders.remove(_OWN_FOLDER)
    if folders:
        os.environ[_PATH_VARIABLE] = os.pathsep.join(folders)
    else:
        del os.environ[_PATH_VARIABLE]
    sys.path.remove(_OWN_FOLDER)
    own = sys.modules.pop("sitecustomize")
    if find_spec("sitecustomize") is not None:
        importlib.import_module("sitecustomize")
    else:
        sys.modules["sitecustomize"] = own


def _wait() -> None:
    """Returns when the script may begin, in the environment that the chief has."""
    started_with = dict(os.environ)
    told: queue.SimpleQueue[tuple[str | None, dict[str, str | None]]] = queue.SimpleQueue()
    # It reads while TensorFlow is imported: a worker whose chief is gone ends at once.
    threading.Thread(target=_listen, args=(started_with, told), daemon=True).start()
    is_imported = _has_imported(_FIRST_IMPORTED)
    module: str | None = _FIRST_IMPORTED
    while module is not None:
        module, changes = told.get()
        for name, value in changes.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        is_imported = is_imported and (module is None or _has_imported(module))
    if not is_imported:
        _begin_again(os.environ)
    gc.freeze()  # Nothing of the script's is there yet. At the end Python would go over all of it for a second.


def _listen(
    started_with: Mapping[str, str], told: "queue.SimpleQueue[tuple[str | None, dict[str, str | None]]]"
) -> None:
    module: str | None = _FIRST_IMPORTED
    while module is not None:
        line = json.loads(_line_of_input())
        module, changes = line["imports"], line["changes"]
        if module == _FIRST_IMPORTED and changes:
            environment = {name: value for name, value in {**started_with, **changes}.items() if value is not None}
            path = [_OWN_FOLDER, *filter(None, [environment.get(_PATH_VARIABLE)])]
            _begin_again({**environment, _PATH_VARIABLE: os.pathsep.join(path)})
        told.put((module, changes))


def _has_imported(module: str) -> bool:
    """Whether the module could be imported. If not, the script meets the same error, in a new process."""
    try:
        importlib.import_module(module)
    except Exception:
        return False
    return True


def _line_of_input() -> bytes:
    """A line of standard input, read without taking more; without one the process ends."""
    line = bytearray()
    while (byte := os.read(0, 1)) != b"\n":
        if not byte:
            os._exit(0)
        line += byte
    return bytes(line)


def _begin_again(environment: Mapping[str, str]) -> None:
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


_leave_the_path()
if _RANK_VARIABLE in os.environ:
    _wait()
elif find_spec("autodist_py") is not None:
    importlib.import_module("autodist_py.cluster.launch.early").start_workers()
