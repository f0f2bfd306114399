"""Where the chief notes its step, for whoever started it."""

import os

from autodist_py.cluster.progress import Progress, new_progress, step_of


def test_the_last_step_that_was_noted_is_read():
    descriptor = new_progress()
    assert step_of(descriptor) == 0
    progress = Progress(descriptor)
    for step in (1, 2, 2**40):
        progress.note(step)
        assert step_of(descriptor) == step
    os.close(descriptor)


def test_steps_that_graphs_begin_are_added_and_noted_when_somebody_asks():
    begun = [0]
    descriptor = new_progress()
    progress = Progress(descriptor)
    progress.note(3)
    progress.add(lambda: begun[0])
    assert progress.step == 3
    begun[0] = 4
    assert (progress.step, step_of(descriptor)) == (7, 7)
    progress.note(9)
    assert (progress.step, step_of(descriptor)) == (9, 9)
    begun[0] = 6
    assert progress.step == 11
    os.close(descriptor)


def test_a_script_may_close_the_descriptor_and_open_another_file_by_that_number(tmp_path):
    descriptor = new_progress()
    progress = Progress(descriptor)
    with open(tmp_path / "users", "wb+", buffering=0) as file:
        os.dup2(file.fileno(), descriptor)
        file.write(bytes(64))
        progress.note(7)
        Progress(descriptor).note(7)
        assert os.pread(descriptor, 64, 0) == bytes(64)
    os.close(descriptor)


def test_a_descriptor_of_no_file_notes_nothing():
    read, write = os.pipe()
    Progress(write).note(1)
    Progress(None).note(1)
    os.close(write)
    assert os.read(read, 1) == b""
    os.close(read)
    Progress(read).note(1)
