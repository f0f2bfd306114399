"""Where the script is that makes a lab of hosts on one machine, and whether it can."""

import os
import re
import shutil
import subprocess
from pathlib import Path

NETLAB = str(Path(__file__).resolve().with_name("netlab.sh"))
_NEEDED = ("ip", "tc", "unshare", "nsenter", "setpriv", "taskset", "ssh-keygen", "ssh", "sshd")


def why_there_is_no_lab() -> str | None:
    """What this machine lacks for one; None: nothing."""
    if os.geteuid() != 0:
        return "needs root"
    path = f"{os.environ['PATH']}:/usr/sbin"
    missing = [name for name in _NEEDED if shutil.which(name, path=path) is None]
    if missing:
        return f"needs {', '.join(missing)}: run `make lab-deps`"
    listed = subprocess.run(["ip", "netns", "list"], check=False, capture_output=True, text=True).stdout
    others = re.findall(r"^(labsw|lab[0-9]+)\b", listed, re.MULTILINE)
    if others:  # Making one would take it down.
        return f"another lab is up on this machine ({', '.join(others)}); if nothing uses it, run `{NETLAB} down`"
    made = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], check=False, capture_output=True)
    return None if made.returncode == 0 else "needs to be allowed to make namespaces"
