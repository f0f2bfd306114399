"""The errors that autodist_py raises for a user to read: the rule, the values received, what to do.

An error that is about an argument's value is also a `ValueError`; one about a run's fate is also a `RuntimeError`.
"""


class AutoDistError(Exception):
    """The base of every error below. Its text can be encoded, whatever bytes a file or an argument had."""

    ag_pass_through = True
    """Autograph leaves it as it is: it would make another class's of it."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(_encodable(one) if isinstance(one, str) else one for one in arguments))


class ResourceSpecError(AutoDistError, ValueError):
    """A resource spec is malformed or contradicts itself."""


class StrategyError(AutoDistError, ValueError):
    """A strategy, or the strategy builder that should make one, does not fit the graph item or the resources."""


class GraphItemError(AutoDistError, ValueError):
    """A graph item contradicts itself."""


class CaptureError(AutoDistError, ValueError):
    """User code holds a construct that cannot be captured."""


class InvalidGraphError(AutoDistError):
    """A pass left a graph that is not well-formed."""


class ClusterError(AutoDistError, RuntimeError):
    """The workers could not be started, joined or kept together."""


class WorkerFailedError(ClusterError):
    """A worker failed, and with it the run."""


class SessionError(AutoDistError, ValueError):
    """A feed or fetch that a distributed session cannot serve."""


def _encodable(text: str) -> str:
    """`text`, with escapes in the place of lone surrogates, which no terminal and no message can carry."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
