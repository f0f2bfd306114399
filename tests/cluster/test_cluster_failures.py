"""What ends a run of two workers early: every process ends in time, with one cause."""

import os
import re
import signal
import time

import pytest

from tests.support.processes import is_running, until

pytestmark = [pytest.mark.alone, pytest.mark.turns(6)]

END_SECONDS = 10.0


def assert_ends_with(run, cause, *, code=1):
    """Once they are ready, every process ends in time with this cause, and none is left."""
    run.wait_for("ready", 2)
    assert run.end(END_SECONDS) == code, run.text
    assert len(set(run.causes.values())) == 1 and set(run.causes) == {0, 1}, run.text
    assert re.fullmatch(cause, run.causes[0]), run.text


def test_a_worker_that_raises_frees_its_peer_from_a_collective_and_shows_its_traceback(start):
    run = start("""
        join()
        ready()
        if cluster.rank == 1:
            time.sleep(1)
            cluster.step = 12
            raise ValueError("boom")
        cluster.step = 12
        ring(1)(3)
    """)

    assert_ends_with(run, r"worker 1 \(127.0.0.2\) failed at step 12: ValueError: boom")
    assert "[1] ValueError: boom" in run.lines
    assert not any(line.startswith("Traceback") for line in run.lines)


def test_a_chief_that_raises_ends_the_others(start):
    run = start("""
        join()
        ready()
        if cluster.is_chief:
            raise ValueError("boom")
        wait_for_ever()
    """)

    assert_ends_with(run, r"worker 0 \(127.0.0.1\) failed before its first step: ValueError: boom")


def test_an_exception_in_a_thread_ends_the_run(start):
    run = start("""
        join()
        ready()
        if cluster.rank == 1:
            threading.Thread(target=lambda: 1 / 0).start()
        time.sleep(60)
    """)

    assert_ends_with(run, r"worker 1 \(127.0.0.2\) failed before its first step: ZeroDivisionError: .*")


def test_a_worker_that_exits_with_a_code_ends_the_run(start):
    run = start("""
        join()
        reduce = ring(1)
        reduce(3)
        cluster.step = 1
        ready()
        if cluster.rank == 1:
            sys.exit(3)
        cluster.step = 2
        reduce(3)
    """)

    assert run.end(END_SECONDS + 80) == 1, run.text
    (cause,) = run.causes.values()
    said = r"worker 1 \(127.0.0.2\) ended, last heard of at step 1(, when the chief is at step 2)?: exit code 3; see .*"
    assert re.fullmatch(said, cause), cause


def test_a_killed_worker_ends_a_run_that_waits_in_a_collective(start):
    run = start("""
        join()
        reduce = ring(1)
        reduce(3)
        ready()
        if cluster.rank == 1:
            time.sleep(60)
        reduce(3)
    """)
    run.wait_for("ready", 2)
    os.kill(run.pids[1], signal.SIGKILL)

    assert run.end(END_SECONDS) == 1, run.text
    assert run.causes == {
        0: "worker 1 (127.0.0.2) ended, last heard of before its first step: killed by SIGKILL; see its output above"
    }


def test_a_worker_that_hangs_ends_the_run(start):
    run = start("""
        join()
        ready()
        time.sleep(60)
    """)
    run.wait_for("ready", 2)
    os.kill(run.pids[1], signal.SIGSTOP)

    assert run.end(END_SECONDS) == 1, run.text
    assert run.causes == {
        0: "worker 1 (127.0.0.2) stopped answering, last heard of before its first step: no heartbeat for 5 s"
    }


@pytest.mark.parametrize(
    ("number", "code", "cause"),
    [
        (signal.SIGINT, 128 + signal.SIGINT, r"worker 0 \(127.0.0.1\) was interrupted .*: KeyboardInterrupt.*"),
        (signal.SIGTERM, 128 + signal.SIGTERM, r"worker 0 \(127.0.0.1\) was terminated .*: SIGTERM"),
    ],
)
def test_a_signal_to_the_chief_ends_all_even_in_a_collective(start, number, code, cause):
    run = start("""
        join()
        reduce = ring(1)
        ready()
        if cluster.rank == 1:
            time.sleep(60)
        reduce(3)
    """)
    run.wait_for("ready", 2)
    time.sleep(0.5)  # Nothing shows that the chief is in the collective by now; it is not held up before.
    os.killpg(run.process.pid, number)

    assert_ends_with(run, cause, code=code)
    assert "Traceback" not in run.text


def test_workers_end_when_the_chief_is_killed(start, tmp_path):
    run = start("""
        join()
        ready()
        try:
            wait_for_ever()
        except WorkerFailedError as error:
            open("cause", "w").write(str(error))
            raise
    """)
    run.wait_for("ready", 2)
    run.process.kill()

    assert run.end(END_SECONDS) == -signal.SIGKILL
    cause = "worker 0 (127.0.0.1), the chief, is lost: its coordinator does not answer"
    assert (tmp_path / "cause").read_text() == cause


def test_a_chief_that_stood_still_says_so_when_it_goes_on(start):
    run = start("""
        join()
        ready()
        wait_for_ever()
    """)
    run.wait_for("ready", 2)
    os.kill(run.pids[0], signal.SIGSTOP)
    until(lambda: not is_running(run.pids[1]), 3 * END_SECONDS)
    os.kill(run.pids[0], signal.SIGCONT)

    assert run.end(END_SECONDS) == 1, run.text
    assert run.causes.pop(1) == "worker 0 (127.0.0.1), the chief, is lost: its coordinator does not answer"
    assert re.fullmatch(
        r"worker 0 \(127.0.0.1\) stood still before its first step: for \d+ s, as a process that is stopped or on a "
        r"sleeping machine; meanwhile worker 1 \(127.0.0.2\) gave it up for lost",
        run.causes[0],
    )


def test_a_worker_whose_script_is_over_does_not_wait_for_a_chief_that_is_silent(start, tmp_path):
    run = start("""
        join()
        ready()
        if cluster.is_chief:
            while not cluster._chief.coordinator._run._roster.left:
                time.sleep(0.01)
            print("over on 1", flush=True)
            time.sleep(120)
    """)
    run.wait_for("over on 1")
    os.kill(run.pids[0], signal.SIGSTOP)

    until(lambda: not is_running(run.pids[1]), END_SECONDS)


def test_a_process_whose_python_stands_still_is_not_lost(start):
    """Neither for the others, nor for itself when it goes on: heartbeats stop, but its TensorFlow server answers."""
    run = start(
        """
        import ctypes
        join()
        ready()
        for rank in (1, 0):
            if cluster.rank == rank:
                ctypes.PyDLL(None).sleep(9)  # It keeps Python's lock.
            cluster.barrier(f"{rank} goes on")
        print("over", flush=True)
    """,
        AUTODIST_HEARTBEAT_TIMEOUT="4",
    )

    assert run.end(6 * END_SECONDS) == 0, run.text
    assert run.causes == {} and "over" in run.lines and "[1] over" in run.lines, run.text


def test_a_worker_that_ends_before_joining_is_reported_at_once(start):
    run = start("""
        if "AUTODIST_RANK" in os.environ:
            sys.exit("no data here")
        join()
    """)

    assert run.end(60) == 1, run.text
    assert "[1] no data here" in run.lines
    assert run.causes == {0: "worker 1 (127.0.0.2) ended before it joined: exit code 1; see its output above"}


def test_a_worker_that_never_joins_is_named(start):
    run = start("""
        if "AUTODIST_RANK" in os.environ:
            time.sleep(60)
        join(timeout=6)
    """)

    assert run.end(30) == 1, run.text
    assert re.search(r"ClusterError: worker 1 \(127.0.0.2\) did not join within 6 s: ", run.causes[0]), run.text
