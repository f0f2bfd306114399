"""Workers on other hosts: a chief on host 0 starts them over SSH, and all end together, whatever happens."""

import json
import re
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.lab.conftest import ENDED_SECONDS, SPEC, SSH, Lab, Run
from tests.support.by_horovod import is_installed

pytestmark = [pytest.mark.alone, pytest.mark.turns(6)]

HEARTBEAT_SECONDS = 3.0
NOTICED_SECONDS = 2.0

THIRD = "  - {address: 10.77.0.3, ssh_config: lab}\n"

TRAINS_DIGITS = """
import os, sys, time
from pathlib import Path
from autodist_py import AutoDist
autodist = AutoDist("spec.yaml" if "AUTODIST_RANK" not in os.environ else "only-on-the-chief.yaml", seed=1)
import keras, numpy as np, tensorflow as tf
from sklearn.datasets import load_digits
from autodist_py.cluster.member import WorkerCluster

keras.config.set_floatx("float64")
images, labels = load_digits(return_X_y=True)

def make():
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input([64]), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10)])
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    def step(x, y):
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True)
            loss = tf.reduce_mean(losses)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss
    return model, optimizer, step

def train(model, optimizer, step):
    for start in range(0, 10 * 50, 50):
        step(images[start : start + 50] / 16, labels[start : start + 50])
    return np.concatenate([np.ravel(variable) for variable in model.variables + optimizer.variables])

model, optimizer, step = make()
first = np.concatenate([np.ravel(variable) for variable in model.variables])
trained = train(model, optimizer, autodist.function(step))
twin, twin_optimizer, twin_step = make()
np.savez(f"trained-{autodist.rank}", first=first, trained=trained, wanted=train(twin, twin_optimizer, twin_step))
if autodist.is_chief:
    Path("secret").write_text(WorkerCluster.of_process._chief._secret)
print("trained on", os.uname().nodename, os.environ.get("SHARED"), sys.argv[1:], flush=True)
while not Path("go").exists():
    time.sleep(0.02)
autodist.close()
"""

TRAINS_FOR_EVER = """
import sys, time
from pathlib import Path
from autodist_py import AutoDist
from autodist_py.strategy_builders.all_reduce import AllReduce
seconds, engine = sys.argv[1:] or (0, "AUTO")
builder = AllReduce(timeout_seconds=float(seconds), all_reduce_spec=engine)
autodist = AutoDist("spec.yaml", seed=1, strategy_builder=builder)
import tensorflow as tf

weights = tf.Variable(tf.ones([64, 1]), name="weights")

@autodist.function
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(x @ weights))
    weights.assign_sub(0.001 * tape.gradient(loss, weights))

number = 0
try:
    while True:
        step(tf.ones([8, 64]))
        number += 1
        if number == 20:
            print("trains", flush=True)
except BaseException as error:
    notes = "; ".join(getattr(error, "__notes__", []))
    Path(f"error-{autodist.rank}").write_text(f"{time.time()} {type(error).__name__}: {error}; {notes}")
    raise
"""


def train(start, folder: Path, script: str, *arguments: str, spec: str = SPEC + SSH, **environment: str) -> Run:
    (folder / "train.py").write_text(script)
    (folder / "spec.yaml").write_text(spec)
    command = [sys.executable, str(folder / "train.py"), *arguments]
    own = {"AUTODIST_HEARTBEAT_TIMEOUT": str(HEARTBEAT_SECONDS)} | environment
    return start(0, command, folder=folder, **own)


# -- One healthy run, looked at from several sides --------------------------------------------------------------------


class Trained(NamedTuple):
    run: Run
    code: int
    arrays: list
    secret: str
    seen: dict[int, dict[str, str]]
    """What other users of each host may look at, by the kind of it."""


@pytest.fixture(scope="module")
def trained(lab: Lab, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("trained")
    # As Debian has it: at home a host's own name is a loopback address.
    (folder / "hosts").write_text("127.0.0.1 localhost\n127.0.1.1 lab0\n10.77.0.2 lab1\n")
    (folder / "train.py").write_text(TRAINS_DIGITS)
    (folder / "spec.yaml").write_text((SPEC + SSH).replace("10.77.0.1", "lab0").replace("10.77.0.2", "lab1"))
    script = 'mount --bind hosts /etc/hosts && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "train.py", "--name", "it's *"]
    runs: list[Run] = []
    try:
        runs.append(lab.start(0, command, folder, AUTODIST_HEARTBEAT_TIMEOUT=str(HEARTBEAT_SECONDS)))
        run = runs[0]
        run.wait_for("trained on", 2)
        kinds = ("cmdline", "environ")
        seen = {host: {kind: "\n".join(lab.processes(host, "", kind).values()) for kind in kinds} for host in (0, 1)}
        (folder / "go").touch()
        code = run.end(ENDED_SECONDS)
        lab.wait_until_gone("train.py", 2.0)
        arrays = [np.load(folder / f"trained-{rank}.npz") for rank in (0, 1)]
        yield Trained(run, code, arrays, (folder / "secret").read_text(), seen)
    finally:
        for run in runs:
            run.close()


def test_weights_trained_on_two_hosts_are_those_of_one_device(trained):
    for worker in trained.arrays:
        assert np.abs(worker["first"] - worker["trained"][: len(worker["first"])]).max() > 1e-3
        np.testing.assert_allclose(worker["trained"], worker["wanted"], rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(trained.arrays[0]["trained"], trained.arrays[1]["trained"])


def test_a_run_on_two_hosts_ends_well(trained):
    assert trained.code == 0, trained.run.text


def test_what_a_remote_worker_prints_is_shown_with_its_rank(trained):
    assert "trained on lab0 None ['--name', \"it's *\"]" in trained.run.lines
    assert "[1] trained on lab1 it's shared ['--name', \"it's *\"]" in trained.run.lines


def test_the_secret_is_in_no_argument_and_no_environment_of_any_process(trained):
    assert re.fullmatch(r"[0-9a-f]{64}", trained.secret)
    for host, kinds in trained.seen.items():
        assert "train.py" in kinds["cmdline"] and "AUTODIST_HEARTBEAT_TIMEOUT" in kinds["environ"], host
        assert not any(trained.secret in text for text in kinds.values()), host


# -- Workers that cannot be started -----------------------------------------------------------------------------------

LAUNCHES = """
import json, os, sys, threading, time
from dataclasses import replace
from pathlib import Path
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec, SSHConfig
from autodist_py.cluster.launch.local import Command, chief_output
from autodist_py.cluster.launch.ssh import SshLauncher
from autodist_py.config.settings import Settings

settings = Settings.from_environment()
started, reasons, done = time.monotonic(), {}, threading.Event()
cases = json.loads(sys.argv[1])

def ended(name):
    def report(rank, code, reason, is_shown):
        reasons[name] = [rank, code, reason, time.monotonic() - started]
        if len(reasons) == len(cases):
            done.set()
    return report

for name, case in cases.items():
    config = SSHConfig(**case.get("ssh", {}))
    node = NodeSpec(case.get("address", "10.77.0.2"), ssh_config="lab")
    resources = ResourceSpec((NodeSpec("10.77.0.1", chief=True), node), ssh=(("lab", config),))
    own = replace(settings, ssh_config=Path(case["config"])) if "config" in case else settings
    if name == "folder":
        os.chdir(case["folder"])
    SshLauncher(Command.of_process(), chief_output(None), resources, own).launch(1, node, on_exit=ended(name))
done.wait(20)
print("reasons", json.dumps(reasons))
"""


@pytest.fixture(scope="module")
def reasons(lab: Lab, tmp_path_factory: pytest.TempPathFactory):
    """Why workers could not be started, by what was wrong: rank, exit code, reason, seconds."""
    folder = tmp_path_factory.mktemp("failing")
    (folder / "launch.py").write_text(LAUNCHES)
    strangers = folder / "strangers"
    config = lab.ssh_config.read_text()
    strangers.write_text(re.sub(r"UserKnownHostsFile .*", f"UserKnownHostsFile {folder}/none", config))
    keyless = folder / "keyless"
    keyless.write_text(re.sub(r" *IdentityFile .*\n", "", config))
    host_key = str(lab.state / "host1" / "host_key")
    cases = {
        "host": {"address": "10.77.0.99"},
        "port": {"ssh": {"port": 2222}},
        "key": {"config": str(keyless), "ssh": {"key_file": host_key}},
        "stranger": {"config": str(strangers)},
        "python": {"ssh": {"python_venv": "/no/venv"}},
        "folder": {"folder": f"{lab.own_folder}/only-here"},
    }
    command = f"mkdir {lab.own_folder}/only-here && exec {sys.executable} {folder}/launch.py '{json.dumps(cases)}'"
    run = lab.start(0, ["sh", "-c", command], folder)
    try:
        assert run.end(30) == 0, run.text
        (line,) = [line for line in run.lines if line.startswith("reasons ")]
        yield json.loads(line.removeprefix("reasons "))
    finally:
        run.close()


@pytest.mark.parametrize(
    ("wrong", "code", "said"),
    [
        ("host", 255, "ssh: connect to host 10.77.0.99 port 22: No route to host"),
        ("port", 255, "ssh: connect to host 10.77.0.2 port 2222: Connection refused"),
        ("key", 255, "root@10.77.0.2: Permission denied (publickey)."),
        ("stranger", 255, "Host key verification failed."),
        ("python", 127, "/no/venv/bin/python: not found"),
        ("folder", 2, "can't cd to {own}/only-here"),
    ],
)
def test_why_a_worker_cannot_be_started_is_told_within_seconds(lab, reasons, wrong, code, said):
    rank, ended, reason, seconds = reasons[wrong]
    assert (rank, ended) == (1, code)
    assert reason.startswith("it could not be started over SSH: ")
    assert said.format(own=lab.own_folder) in reason
    assert "`ssh -T -F " in reason and "without a question, and there must be the folder " in reason
    assert seconds < 10


def test_a_run_whose_worker_cannot_be_started_ends_with_that_cause(start, tmp_path):
    spec = SPEC.replace("10.77.0.2", "10.77.0.99") + SSH
    run = train(start, tmp_path, TRAINS_FOR_EVER, spec=spec)

    assert run.end(60) == 1, run.text
    assert run.lines[-1].startswith(
        "autodist: worker 1 (10.77.0.99) ended before it joined: it could not be started over SSH: ssh: connect to "
    )


# -- The end of a run --------------------------------------------------------------------------------------------------


def test_when_the_chief_is_killed_nothing_stays_on_any_host(lab, start, tmp_path):
    run = train(start, tmp_path, TRAINS_FOR_EVER)
    run.wait_for("trains", 2)
    assert len(lab.processes(1, "train.py")) == 2  # The worker, and what ends it.

    run.send(signal.SIGKILL)

    lab.wait_until_gone(str(tmp_path), ENDED_SECONDS)
    lab.wait_until_gone("10.77.0.2", 2.0)
    assert "worker 0 (10.77.0.1), the chief, is lost" in (tmp_path / "error-1").read_text()


ONLY_LAUNCHES = """
import os, time
from autodist_py.config.resource_spec import load_resource_spec
from autodist_py.cluster.chief import Chief
from autodist_py.config.settings import Settings

if "AUTODIST_RANK" in os.environ:
    print("launched")
else:
    chief = Chief.start(load_resource_spec("spec.yaml"), Settings.from_environment())
    chief.launch_workers()
time.sleep(600)
"""


def test_a_worker_that_has_not_joined_ends_with_a_killed_chief(lab, start, tmp_path):
    run = train(start, tmp_path, ONLY_LAUNCHES, AUTODIST_EXIT_GRACE="0.5")
    run.wait_for("launched")

    run.send(signal.SIGKILL)

    lab.wait_until_gone(str(tmp_path), ENDED_SECONDS)


def test_ctrl_c_ends_all_on_all_hosts(lab, start, tmp_path):
    run = train(start, tmp_path, TRAINS_FOR_EVER)
    run.wait_for("trains", 2)

    run.press_ctrl_c()

    assert run.end(ENDED_SECONDS) == 128 + signal.SIGINT, run.text
    causes = [line.removeprefix("[1] ") for line in run.lines if "autodist: " in line]
    assert len(causes) == 2 and len(set(causes)) == 1, run.text
    assert causes[0].startswith("autodist: worker 0 (10.77.0.1) was interrupted at step ")
    lab.wait_until_gone(str(tmp_path), 2.0)


@pytest.mark.parametrize(
    ("host", "heartbeat", "timeout", "engine"),
    [
        (2, HEARTBEAT_SECONDS, 60.0, "AUTO"),
        (2, 30.0, 2.5, "AUTO"),
        (0, 30.0, 2.5, "AUTO"),
        pytest.param(2, HEARTBEAT_SECONDS, 60.0, "HOROVOD", marks=is_installed),
    ],
)
def test_when_a_host_is_cut_off_all_raise_and_name_who_is_missing_and_the_group(
    lab, start, tmp_path, host, heartbeat, timeout, engine
):
    own = {"AUTODIST_HEARTBEAT_TIMEOUT": str(heartbeat)}
    run = train(start, tmp_path, TRAINS_FOR_EVER, str(timeout), engine, spec=SPEC + THIRD + SSH, **own)
    run.wait_for("trains", 3)
    cut = time.time()

    lab.do("cut", str(host))
    try:
        assert run.end(ENDED_SECONDS) == 1, run.text
        lab.wait_until_gone(str(tmp_path), ENDED_SECONDS)
    finally:
        lab.do("heal", str(host))

    limit = f"{heartbeat:g} s" if heartbeat < timeout else f"{timeout:g} s, with timeout_seconds {timeout:g}"
    silent = rf"worker {host or '[12]'} \(.*\) stopped answering, .*: no heartbeat for {limit}"
    lost = r"worker 0 \(10.77.0.1\), the chief, is lost: its coordinator does not answer"
    group = "dense gradients of weights"
    waits = "waited for it to combine" if engine == "AUTO" else "(waited for it to combine|was in a step that combines)"
    for rank in range(3):
        raised, _, error = (tmp_path / f"error-{rank}").read_text().partition(" ")
        missing, waiting = (lost, rank) if rank and host in (0, rank) else (silent, r"\d")
        where = rf", while worker {waiting} \(10.77.0.\d\) {waits} {group}; while this worker"
        assert re.match(f"WorkerFailedError: {missing}{where}", error), error
        assert float(raised) - cut < min(heartbeat, timeout) + NOTICED_SECONDS
