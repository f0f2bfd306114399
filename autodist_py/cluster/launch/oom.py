"""How many processes the kernel has killed for lack of memory: the counters of a process's own control group."""

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


def _counters(root: Path, own: Path) -> Iterator[Path]:
    """The files that may have the counter: of version 2 of control groups, and of version 1.

    In a container the path that a process is told may lead from a folder further up, which it does not see. Version 2
    then counts at the top of what it sees; the top's own number in version 1 may leave this process's group out.
    """
    try:
        groups = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return
    for number, controllers, path in (group for group in groups if len(group) == 3):
        if number == "0" and not controllers:
            yield from (folder / "memory.events" for folder in (root / path.lstrip("/"), root))
        elif "memory" in controllers.split(","):
            yield root / "memory" / path.lstrip("/") / "memory.oom_control"
