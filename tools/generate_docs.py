"""Writes the pages of docs/ that say what the code says: docs/settings.md.

python tools/generate_docs.py            writes them
python tools/generate_docs.py --check    fails where one is not as it would be written
"""

import ast
import dataclasses
import inspect
import sys
from pathlib import Path

from autodist_py.settings import OWN_VARIABLES, Settings

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


PAGES = {"settings.md": settings_page}


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
