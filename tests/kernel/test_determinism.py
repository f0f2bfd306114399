"""The same program is compiled to the same graph, and the same schedule, in every process."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_CODE = """
import hashlib

from tests.support import crossed_steps

for name in crossed_steps.CROSSED:
    for worker in range(2):
        program = crossed_steps.compiled(name, worker=worker)
        graphs = [program.graph, *(part.graph for one in program.servers for part in (one.update, one.answer))]
        digest = hashlib.sha256(str(program.schedule).encode())
        for graph in graphs:
            digest.update(graph.graph_def().SerializeToString(deterministic=True))
        print(name, worker, len(program.schedule.events), digest.hexdigest())
"""


def compiled_under(seed: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _CODE],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": seed, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_programs_of_servers_and_collectives_are_compiled_alike_under_every_hash_seed():
    first, other = (compiled_under(seed) for seed in ("1", "4242"))
    assert first == other
    assert len(first.splitlines()) > 4
