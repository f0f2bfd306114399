"""One worker of one system, in a process of its own: it trains when it is told to, and waits in between.

Standard input has a command a line, and standard output an answer a line, both in JSON: first the losses of the first
steps, unasked; then for each number the seconds of so many steps, after one that is not counted. The end of input
ends it.

Usage: python -m benchmarks.training_process SYSTEM WORKLOAD RANK PORT ADDRESS...
"""

import importlib.util
import json
import os
import sys
import time
import traceback

FIRST_STEPS = 12
"""Those whose losses are compared. autodist_py compares what workers are given in the first ten."""
TORCH = "torch DDP"


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # What libraries print is no answer.
    system, workload, rank, port, *addresses = sys.argv[1:]
    if system == TORCH and importlib.util.find_spec("triton") is not None:
        importlib.import_module("triton._C.libtriton")  # torch imports it late, and after TensorFlow that crashes.
    from benchmarks.systems import SYSTEMS, Worker, set_threads
    from benchmarks.workloads import WORKLOADS

    set_threads()
    step = SYSTEMS[system].train(WORKLOADS[workload], Worker(int(rank), addresses, int(port)))
    losses = [_number(step(number)) for number in range(FIRST_STEPS)]
    print(json.dumps(losses), file=answers)
    taken = FIRST_STEPS
    for line in sys.stdin:
        count = json.loads(line)
        _number(step(taken))
        started = time.perf_counter()
        for number in range(taken + 1, taken + 1 + count):
            loss = step(number)
        _number(loss)
        print(json.dumps(time.perf_counter() - started), file=answers)
        taken += 1 + count


def _number(loss: object) -> float:
    return float(loss)  # type: ignore[arg-type]


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # Other workers may be gone, and libraries wait for them.
