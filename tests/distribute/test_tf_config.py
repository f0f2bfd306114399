"""`MultiWorkerMirroredStrategy` of workers that a scheduler starts, each with its TF_CONFIG."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.distribute_outcomes import Outcomes, require_equal, two_tasks
from tests.support.processes import ROOT

pytestmark = [pytest.mark.turns(3)]

SCRIPT = """
import os, sys
import tensorflow as tf
from autodist_py.distribute import MultiWorkerMirroredStrategy

strategy = MultiWorkerMirroredStrategy({arguments})
task = strategy.cluster_resolver
with strategy.scope():
    v = tf.Variable([1.0, 2.0], aggregation=tf.VariableAggregation.SUM)


@tf.function
def step():
    strategy.run(lambda: v.assign_add(tf.ones([2])))


"""


class Scripts:
    """Processes that run a script, one for each environment; what they print."""

    def __init__(self, folder: Path, *environments: dict[str, str], body: str, arguments: str = ""):
        (folder / "train.py").write_text(SCRIPT.format(arguments=arguments) + body)
        own = {name: value for name, value in os.environ.items() if not name.startswith("AUTODIST_")}
        own |= {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
        started = [
            subprocess.Popen(
                [sys.executable, "train.py"],
                cwd=folder,
                env=own | environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for environment in environments
        ]
        try:
            self.texts = [process.communicate(timeout=150)[0] for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait(10)
        self.codes = [process.returncode for process in started]


def as_environments(*configs: object) -> list[dict[str, str]]:
    return [{"TF_CONFIG": json.dumps(config)} for config in configs]


def test_training_is_that_of_tensorflows_own(tmp_path: Path) -> None:
    case = "adam_with_global_clipnorm"
    outcomes = Outcomes(tmp_path, ("tensorflow-workers", "ours-tasks"), 1, case)
    assert outcomes.codes == [0, 0, 0, 0]
    for worker in range(2):
        theirs = outcomes.arrays("tensorflow-workers", case, worker)
        require_equal(theirs, outcomes.arrays("ours-tasks", case, worker), exactly=False)


def test_a_chief_of_its_own_job_is_the_first(tmp_path: Path) -> None:
    first, second = (config["cluster"]["worker"][index] for index, config in enumerate(two_tasks()))
    cluster = {"chief": [first], "worker": [second]}
    tasks = [{"type": job, "index": 0} for job in ("worker", "chief")]
    body = "step()\nprint(task.task_type, task.task_id, strategy.num_replicas_in_sync, v.numpy().tolist())\n"
    run = Scripts(tmp_path, *as_environments(*({"cluster": cluster, "task": task} for task in tasks)), body=body)

    assert run.codes == [0, 0]
    assert "worker 0 2 [3.0, 4.0]" in run.texts[0]
    assert "chief 0 2 [3.0, 4.0]" in run.texts[1]


def test_a_resolver_says_the_same(tmp_path: Path) -> None:
    workers = next(two_tasks())["cluster"]["worker"]
    resolver = (
        "tf.distribute.cluster_resolver.SimpleClusterResolver("
        f"tf.train.ClusterSpec({{'worker': {workers}}}), task_type='worker', task_id=int(os.environ['OWN']))"
    )
    body = "step()\nprint(task.task_type, task.task_id, v.numpy().tolist())\n"
    run = Scripts(tmp_path, {"OWN": "0"}, {"OWN": "1"}, body=body, arguments=resolver)

    assert run.codes == [0, 0]
    assert ["worker 0 [3.0, 4.0]" in run.texts[0], "worker 1 [3.0, 4.0]" in run.texts[1]] == [True, True]


def test_a_worker_that_fails_ends_the_run(tmp_path: Path) -> None:
    body = """
for number in range(10_000):
    step()
    if (task.task_id, number) == (1, 7):
        os._exit(3)
"""
    run = Scripts(tmp_path, *as_environments(*two_tasks()), body=body)

    assert 0 not in run.codes
    assert "worker 1 (127.0.0.2)" in run.texts[0]


def test_who_joins_nobody_is_alone_or_is_told_why(tmp_path: Path) -> None:
    evaluator = {"cluster": {"worker": ["127.0.0.1:4000"]}, "task": {"type": "evaluator", "index": 0}}
    environments = [
        *as_environments({}, evaluator),
        as_environments(next(two_tasks()))[0] | {"AUTODIST_RESOURCE_SPEC": "spec.yaml"},
        {"TF_CONFIG": "{cluster"},
    ]
    body = "step()\nprint(strategy.num_replicas_in_sync, v.numpy().tolist())\n"
    run = Scripts(tmp_path, *environments, body=body)

    assert ["1 [2.0, 3.0]" in text for text in run.texts] == [True, True, False, False]
    assert "a run's workers are given in one way" in run.texts[2]
    assert "AUTODIST_RESOURCE_SPEC" in run.texts[2]
    assert "TF_CONFIG is JSON with the addresses of a cluster. Received: '{cluster'" in run.texts[3]
