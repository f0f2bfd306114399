"""PlanCommunication: what workers tell one another in a step is decided."""

from dataclasses import dataclass, replace
from typing import ClassVar

from autodist_py.kernel.program import Invariant, Program
from autodist_py.kernel.runner import Contract
from autodist_py.kernel.schedule import schedule


@dataclass(frozen=True, slots=True)
class PlanCommunication:
    """What workers tell one another in a step is decided, and in which order.

    Ensures: the program has a schedule, the same on every worker. Later passes lower its events, and no others.

    Example, on worker 0 of two: a linear regression, which returns its loss.

        + event FetchResults[RING] fetches loss:0
        + event AllReduceBucket[RING] dense gradients of w
    """

    name: ClassVar[str] = "plan-communication"
    contract: ClassVar[Contract] = Contract(requires={Invariant.CAPTURED, Invariant.CUT}, ensures={Invariant.SCHEDULED})

    def __call__(self, program: Program) -> Program:
        return replace(program, schedule=schedule(program))
