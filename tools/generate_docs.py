"""Writes the pages of docs/ that say what the code says: docs/settings.md and docs/passes.md.

python tools/generate_docs.py            writes them
python tools/generate_docs.py --check    fails where one is not as it would be written
"""

import ast
import dataclasses
import inspect
import os
import sys
from collections.abc import Set
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # The passes load TensorFlow.

from autodist_py.config.settings import OWN_VARIABLES, Settings
from autodist_py.kernel.pipeline import PASSES
from autodist_py.kernel.program import Invariant

DOCS = Path(__file__).resolve().parent.parent / "docs"
PREFACE = """# Settings

What the environment says about a run. A variable of the chief counts for all workers that it starts. What a script may
choose is an argument of `AutoDist` ([training.md](training.md)). This page is made from `Settings` by `make docs`.

| variable | default | meaning |
| --- | --- | --- |
"""


def texts(kind: type) -> dict[str, str]:
    """The string under each field of a class, by the field's name, as one line."""
    (node,) = ast.parse(inspect.getsource(kind)).body
    if not isinstance(node, ast.ClassDef):
        raise TypeError(f"{kind} is no class")
    found = {}
    for field, below in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            found[field.target.id] = " ".join(str(ast.literal_eval(below.value)).split())
    return found


def settings_page() -> str:
    """docs/settings.md."""
    said = texts(Settings)
    rows = []
    for field in dataclasses.fields(Settings):
        name = f"AUTODIST_{field.name.upper()}"
        if name not in OWN_VARIABLES:
            default = "" if field.default is None else f"`{field.default}`"
            rows.append(f"| `{name}` | {default} | {said[field.name]} |")
    own = ", ".join(f"`{name}`" for name in OWN_VARIABLES)
    return PREFACE + "\n".join(rows) + f"\n\nThe command line sets {own} for the processes that it starts.\n"


PASSES_PREFACE = """# Passes

The passes of the kernel, in order. A pass is run only where what it requires holds. What it ensures is checked after
it, and after each later pass. [writing-a-pass.md](writing-a-pass.md) says how to add one; the folders of
`tests/kernel/goldens` show a program after each. This page is made from their docstrings and contracts by `make docs`.

An example has the ops that are gone (`-`) and those that are there instead (`+`), as a test finds them;
`...` stands for more. `name = Type(inputs)` is an op, and `^name` is one that it waits for. In local replica 1 the op
`name` is called `1/name`. Ops that one TensorFlow function makes are a line: `name = ops(what they read)`. `@` is the
device.

| what may hold | |
| --- | --- |
"""


def passes_page() -> str:
    """docs/passes.md."""
    rows = "\n".join(f"| {one.name} | {one.value} |" for one in Invariant)
    sections = []
    for number, step in enumerate(PASSES, start=1):
        contract = step.contract
        facts = [("requires", contract.requires), ("ensures", contract.ensures), ("ends", contract.ends)]
        listed = "; ".join(f"{what} {_names(those)}" for what, those in facts if those)
        said = inspect.cleandoc(type(step).__doc__ or "")
        sections.append(f"## {number}. {step.name}\n\n*{listed}*\n\n{said}\n")
    return PASSES_PREFACE + rows + "\n\n" + "\n".join(sections)


def _names(those: Set[Invariant]) -> str:
    return ", ".join(one.name for one in Invariant if one in those)


PAGES = {"settings.md": settings_page, "passes.md": passes_page}


def main() -> int:
    """Returns how many pages are not as they should be."""
    wrong = 0
    for name, page in PAGES.items():
        path, text = DOCS / name, page()
        if sys.argv[1:] != ["--check"]:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            print(f"docs/{name} is not what the code says: run `make docs`", file=sys.stderr)
            wrong += 1
    return wrong


if __name__ == "__main__":
    sys.exit(main())
