"""No sentence of README, of an error message or of a docstring's first line has more than 30 words.

Usage: tools/check_sentences.py    (exit code 1, and a line for each sentence that is longer)
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ("autodist_py", "kernel", "proto", "strategy_builders")
MOST_WORDS = 30

_END = re.compile(r"(?<=[.!?])\s+(?=\S)|\n\s*[-*|]\s|\n\n")
_CODE = re.compile(r"```.*?```|`[^`]*`|\[([^\]]*)\]\([^)]*\)", re.DOTALL)


class Sentence(NamedTuple):
    """One that is too long, and where it stands."""

    place: str
    words: int
    text: str


def sentences(text: str) -> Iterator[str]:
    """The sentences of a text, with each piece of code as one word."""
    plain = _CODE.sub(lambda found: found[1] or "code", text)
    yield from (one.strip() for one in _END.split(plain) if one.strip())


def too_long(place: str, text: str) -> Iterator[Sentence]:
    """The sentences of `text` with more words than one may have."""
    for sentence in sentences(text):
        words = len(re.findall(r"[\w'’{}.-]*\w[\w'’{}.-]*", sentence))
        if words > MOST_WORDS:
            yield Sentence(place, words, " ".join(sentence.split()))


def message_of(node: ast.expr) -> str:
    """The text of an error message; what is put into it counts as one word."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(message_of(value) for value in values)
        case ast.FormattedValue():
            return "X"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return message_of(left) + message_of(right)
        case ast.IfExp(body=body):
            return message_of(body)
    return "X"


def of_module(path: Path) -> Iterator[Sentence]:
    """What is too long in a module: first lines of docstrings, and what errors say."""
    for node in ast.walk(ast.parse(path.read_text())):
        name = str(path.relative_to(ROOT))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = (ast.get_docstring(node) or "").partition("\n\n")[0]
            yield from too_long(f"{name}:{getattr(node, 'lineno', 1)}", first)
        elif isinstance(node, ast.Call) and _is_error(node.func) and node.args:
            yield from too_long(f"{name}:{node.lineno}", message_of(node.args[0]))


def _is_error(function: ast.expr) -> bool:
    called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return called.endswith("Error")


def sources() -> Iterator[Path]:
    """The hand-written modules, each once."""
    for folder in LIBRARY:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "_pb2" not in path.stem and path.resolve() == path:
                yield path


def main() -> int:
    """Prints what is too long; 1 if anything is."""
    found = list(too_long("README.md", (ROOT / "README.md").read_text()))
    for path in sources():
        found += of_module(path)
    for place, words, text in found:
        print(f"{place}: {words} words: {text}")
    print(f"{len(found)} sentences have more than {MOST_WORDS} words", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
