"""A process's own control group: how many processes the kernel has killed there for lack of memory, and its limit."""

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def killed_for_memory(root: Path = _ROOT, own: Path = Path("/proc/self/cgroup")) -> int | None:
    """The number for this process's control group and those inside it; None: the system does not say.

    Version 1 of control groups counts for each alone, so those inside are not in its number.

    Args:
        root: where control groups are mounted.
        own: the file that names this process's.
    """
    for counters in _counters(root, own):
        try:
            lines = counters.read_text().splitlines()
        except OSError:
            continue
        found = [line.split()[1] for line in lines if line.split()[:1] == ["oom_kill"] and len(line.split()) == 2]
        if found and found[0].isdigit():
            return int(found[0])
    return None


def memory_limit(root: Path = _ROOT, own: Path = Path("/proc/self/cgroup")) -> int | None:
    """The bytes that this process's control group, and each of those around it, may have; None: there is no limit.

    Args:
        root: as for `killed_for_memory`.
        own: likewise.
    """
    limits = []
    for top, group, is_first in _groups(root, own):
        around = [group, *(folder for folder in group.parents if folder.is_relative_to(top))]
        for folder in around:
            try:
                text = (folder / ("memory.limit_in_bytes" if is_first else "memory.max")).read_text().strip()
            except OSError:
                continue
            limits += [int(text)] if text.isdigit() else []
    return min(limits, default=None)


def _counters(root: Path, own: Path) -> Iterator[Path]:
    """The files that may have the counter: of version 2 of control groups, and of version 1.

    In a container the path that a process is told may lead from a folder further up, which it does not see. Version 2
    then counts at the top of what it sees; the top's own number in version 1 may leave this process's group out.
    """
    for top, group, is_first in _groups(root, own):
        if is_first:
            yield group / "memory.oom_control"
        else:
            yield from (folder / "memory.events" for folder in (group, top))


def _groups(root: Path, own: Path) -> Iterator[tuple[Path, Path, bool]]:
    """The process's groups that count memory: the folder of all groups, its own, and whether they are of version 1."""
    try:
        groups = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return
    for number, controllers, path in (group for group in groups if len(group) == 3):
        if number == "0" and not controllers:
            yield root, root / path.lstrip("/"), False
        elif "memory" in controllers.split(","):
            yield root / "memory", root / "memory" / path.lstrip("/"), True
