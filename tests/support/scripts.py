"""Scripts as the processes of three workers of this machine."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.processes import ROOT

BEGINNING = """
import os, signal, sys, time
from autodist_py import AutoDist
autodist = AutoDist(strategy_builder=os.environ["BUILDER"])
import numpy as np, tensorflow as tf
"""
SPEC = "nodes: [{address: 127.0.0.1, chief: true}, {address: 127.0.0.2}, {address: 127.0.0.3}]"


def run_script(folder: Path, body: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(BEGINNING + body)
    (folder / "spec.yaml").write_text(SPEC)
    own = {name: value for name, value in os.environ.items() if not name.startswith("AUTODIST_")}
    own |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    own |= {"AUTODIST_OUTPUT": "all"}
    return subprocess.run(
        [sys.executable, "train.py"],
        cwd=folder,
        env={**own, "AUTODIST_RESOURCE_SPEC": "spec.yaml", "BUILDER": "PS(sync=False)", **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
