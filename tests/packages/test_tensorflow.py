"""TensorFlow's own tests of MirroredStrategy, from its repository, pass with ours in its place, but for a list."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / f".cache/tensorflow-{version('tensorflow')}/tensorflow/python/distribute"
"""`make packages` fetches it."""
SECONDS = 1200

if not SOURCE.is_dir():
    pytest.skip(f"needs TensorFlow's repository in {SOURCE}: `make packages` fetches it", allow_module_level=True)

BY_INTENT = {
    "mirrored_strategy_test": {
        "testFunctionInCallForEachReplica_": "the function is traced once, not once for each replica",
        "testFunctionInCallForEachReplicaInsideAnotherFunction_": "likewise",
        "testControlFlowFunctionInCallForEachReplicaWithMergeCall_": "the RuntimeError has other words",
    },
    "strategy_gather_test": {"testAllGatherRaiseDifferentRank_": "the ValueError has other words"},
    "values_test": {"testMakeDistributedValueAndRun_": "Python numbers of each replica are refused: tensors overflow"},
    "strategy_common_test": {"testMergeCallInitScope_": "what init_scope has computed is one value for all replicas"},
    "mirrored_variable_test": {
        "testVariableWithTensorInitialValueInFunctionXLA_": "TensorFlow cannot compile it; here it works"
    },
    "values_v2_test": {"testStrategyRun_": "the test makes a variable of a class that no strategy makes"},
}
"""Tests that end otherwise under TensorFlow's strategy, by file, and why."""

FILES = {
    "mirrored_strategy_test": 104,
    "strategy_common_test": 71,
    "strategy_gather_test": 224,
    "custom_training_loop_gradient_test": 12,
    "custom_training_loop_input_test": 69,
    "values_test": 40,
    "values_v2_test": 48,
    "vars_test": 148,
    "distributed_variable_test": 494,
    "mirrored_variable_test": 85,
    "mirrored_values_test": 6,
    "per_replica_test": 10,
    "packed_distributed_variable_test": 5,
    "input_lib_test": 175,
    "tf_function_test": 22,
    "metrics_v1_test": 69,
    "moving_averages_test": 30,
    "random_generator_test": 37,
    "checkpointing_test": 2,
    "shared_variable_creator_test": 5,
    "warm_starting_util_test": 12,
}
"""How many pass at least, as docs/distribute.md says. Those of several GPUs, TPUs and other strategies are not run."""


def outcomes(kind: str, file: str) -> dict[str, str]:
    arguments = [sys.executable, "-m", "tests.packages.tensorflow_worker", kind, str(SOURCE / f"{file}.py")]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    ran = subprocess.run(
        arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, str] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("file", FILES)
def test_tensorflows_tests_pass_as_under_its_own_strategy(file: str) -> None:
    ours, theirs = (outcomes(kind, file) for kind in ("ours", "tensorflow"))
    differs = {test for test, outcome in theirs.items() if ours.get(test) != outcome}
    by_intent = BY_INTENT.get(file, {})
    assert not {test for test in differs if not any(each in test for each in by_intent)}
    assert sum(outcome == "passed" for outcome in ours.values()) >= FILES[file]
