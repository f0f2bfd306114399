"""How far one gradient goes through the code, and what a program carries: the figures of `make house`."""

from dataclasses import fields

from autodist_py.kernel.program import Program
from tools.house import gradients_walk

CALLS, MODULES, FIELDS = 60, 14, 12


def test_a_dense_gradient_is_lowered_by_few_calls_between_few_modules():
    walk = gradients_walk()
    assert len(walk) <= CALLS
    assert len({module for call in walk for module in call}) <= MODULES


def test_a_program_has_few_fields():
    assert len(fields(Program)) <= FIELDS
