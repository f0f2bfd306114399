"""What is added to an error that a step raises: at which of the user's lines it was, and what may have made it."""

import re

import tensorflow as tf

from autodist_py.capture.recording.user_code import fixed_size, line_of, made_by
from autodist_py.program.calls import Call


def explain(error: Exception, call: Call, graph: tf.Graph | None, *, shared: str) -> None:
    """Let a failure on a replica's rows say at which of the user's lines, and what may have made it.

    Args:
        error: what the step raised; notes are added to it.
        call: what the step was given.
        graph: the step as it was captured; None: it was not.
        shared: the arguments that are shared out by having the first one's number of rows, in words; "": none.
    """
    found = re.search(r"\{\{node AutoDist-Replica-\d+/([^}]+)\}\}", str(error))
    op = None if found is None or graph is None else made_by(graph, found[1])
    if op is None or call.examples is None:
        return
    error.add_note(f"'{op.name}' ({op.type}) was made in {line_of(op)}")
    fixed = fixed_size(op, call.examples)
    if fixed is not None:
        error.add_note(
            f"'{fixed.name}', made in {line_of(fixed)}, has {call.examples} rows whatever the batch, as the whole "
            "batch has; a replica is given its part of it. Write tf.shape(x)[0], or -1 in a reshape, for the "
            "number of examples"
        )
    elif shared:
        error.add_note(
            f"each replica is given its part of {shared}, as all have the first one's number of rows. If one of "
            "them is no batch, such as weights of classes, name those that are: autodist.function(batched=[...])"
        )
