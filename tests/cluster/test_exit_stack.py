"""What ends with a process ends in the order that `Ending` lists, whatever came first, and nothing else ends it."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from autodist_py.cluster.exit_stack import Ending, ExitStack

ROOT = Path(__file__).resolve().parent.parent.parent

WRITTEN = ["STEPS_OF_OTHERS", "MESSAGES", "VALUES", "HOROVOD", "TIMELINE", "SCRIPT"]
"""Others may ask until they have ended. Then threads end, and the cause is shown when nothing else can hang."""

PROCESS = """
import atexit, os, sys
from autodist_py.cluster.exit_stack import Ending, at_exit

atexit.register(print, "registered before", flush=True)

def wrong():
    raise ValueError("the profiler is gone")

for ending in (Ending.SCRIPT, *Ending):
    at_exit(ending, lambda name=ending.name: print(name, flush=True))
at_exit(Ending.TIMELINE, wrong)
at_exit(Ending.VALUES, lambda: print("taken back"))()
atexit.register(print, "registered after", flush=True)
if os.fork() == 0:
    print("forked", flush=True)
    sys.exit()
os.wait()
"""


def noting(stack: ExitStack, told: list[str], ending: Ending, name: str) -> Callable[[], None]:
    return stack.add(ending, lambda: told.append(name))


@pytest.mark.parametrize("endings", [list(Ending), list(reversed(Ending))], ids=["as listed", "the other way"])
def test_everything_ends_in_the_written_order_whatever_came_first(endings: list[Ending]) -> None:
    stack, told = ExitStack(), list[str]()
    for ending in endings:
        noting(stack, told, ending, ending.name)
    stack.run()
    assert told == WRITTEN


def test_of_one_kind_what_came_last_ends_first() -> None:
    stack, told = ExitStack(), list[str]()
    for name in ("first", "second"):
        noting(stack, told, Ending.MESSAGES, name)
    stack.run()
    assert told == ["second", "first"]


def test_each_ends_once_and_what_is_taken_back_does_not() -> None:
    stack, told = ExitStack(), list[str]()
    take_back = noting(stack, told, Ending.MESSAGES, "closed before")
    noting(stack, told, Ending.MESSAGES, "open")
    take_back()
    take_back()
    stack.run()
    stack.run()
    assert told == ["open"]


def test_what_ends_one_of_two_alike_leaves_the_other() -> None:
    stack, told = ExitStack(), list[str]()

    def end() -> None:
        told.append("end")

    stack.add(Ending.MESSAGES, end)
    stack.add(Ending.MESSAGES, end)()
    stack.run()
    assert told == ["end"]


def test_what_raises_holds_up_nothing_and_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    stack, told = ExitStack(), list[str]()

    def interrupted() -> None:
        raise KeyboardInterrupt

    stack.add(Ending.STEPS_OF_OTHERS, interrupted)
    noting(stack, told, Ending.SCRIPT, "SCRIPT")
    stack.run()
    assert told == ["SCRIPT"]
    assert "KeyboardInterrupt" in caplog.text and Ending.STEPS_OF_OTHERS.value in caplog.text


def test_what_is_added_while_the_process_ends_ends_too() -> None:
    stack, told = ExitStack(), list[str]()
    stack.add(Ending.SCRIPT, lambda: threading.Thread(target=stack.add, args=(Ending.VALUES, late)).run())

    def late() -> None:
        told.append("late")

    stack.run()
    assert told == ["late"]


def test_a_process_ends_what_is_its_own_after_what_its_script_registers() -> None:
    done = subprocess.run([sys.executable, "-c", PROCESS], cwd=ROOT, capture_output=True, text=True, timeout=60)
    expected = ["registered after", *WRITTEN, "SCRIPT", "registered before"]
    forked = ["forked", "registered after", "registered before"]
    assert done.stdout.splitlines() == forked + expected
    assert "TensorFlow's profiler did not end well" in done.stderr and "the profiler is gone" in done.stderr
    assert done.returncode == 0
