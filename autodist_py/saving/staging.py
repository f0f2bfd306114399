"""`staged`: a file or folder that appears under its name when it is whole.

It is written in a folder beside its place, under its own name, as writers derive other names from it, and moved.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def staged(path: str, *, makes_folders: bool = False) -> Iterator[str]:
    """Within it, where to write what shall be at `path`; on the way out it is moved there, not where it raised.

    A file takes the place of another at once. A folder takes that of another in two renames, so for a moment there is
    none; what only the old one has is kept in it. Where nothing can be renamed (an address such as gs://..., a folder
    that is not there or not ours, a device, the working folder), this is `path` itself.

    Args:
        path: where a writer would write.
        makes_folders: whether the writer makes the folders that lead there.
    """
    topology = os.path.realpath(path)
    folder, name = os.path.split(topology)
    if makes_folders and "://" not in path:
        os.makedirs(folder, exist_ok=True)
    if "://" in path or not _can_be_replaced(topology):
        yield path
        return
    stage = tempfile.mkdtemp(prefix=f".{name}.", dir=folder)
    try:
        yield os.path.join(stage, name)
        for each in sorted(os.listdir(stage), key=lambda each: each == name):  # What refers to others comes last.
            _move(os.path.join(stage, each), os.path.join(folder, each), stage)
    except OSError as error:
        if isinstance(error.filename, str) and error.filename.startswith(stage):
            error.filename = path
        raise
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _can_be_replaced(topology: str) -> bool:
    is_special = os.path.exists(topology) and not (os.path.isfile(topology) or os.path.isdir(topology))
    is_in_use = os.path.isdir(topology) and (
        os.path.ismount(topology) or os.path.commonpath([topology, os.path.realpath(os.getcwd())]) == topology
    )
    folder = os.path.dirname(topology)
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK) and not is_special and not is_in_use


def _move(source: str, target: str, stage: str) -> None:
    if not os.path.isdir(target) or not os.path.isdir(source):
        os.replace(source, target)
        return
    old = os.path.join(stage, f"{os.path.basename(target)}.old")
    os.rename(target, old)
    os.rename(source, target)
    _keep(old, target)


def _keep(old: str, new: str) -> None:
    """What is in `old` only is in `new`, too."""
    for each in os.listdir(old):
        before, now = os.path.join(old, each), os.path.join(new, each)
        if os.path.isdir(before) and os.path.isdir(now):
            _keep(before, now)
        elif not os.path.lexists(now):
            os.rename(before, now)
