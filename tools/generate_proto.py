"""Python code for every `.proto` of `autodist_py/proto`: written there, or with `--check` compared with what is there.

The code is checked in, so users need no protoc. Another release of grpcio-tools would make other text, so the one that
setup.cfg pins is required. Generated code refuses a protobuf (and grpcio) older than its generator: a new pin goes with
new lower bounds there.
"""

from __future__ import annotations

import argparse
import configparser
import importlib
import importlib.metadata
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = "autodist_py/proto"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 when the generated code is (now) up to date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 naming the files that are out of date"
    )
    check = parser.parse_args(arguments).check

    pinned, installed = pinned_generator(), importlib.metadata.version("grpcio-tools")
    if installed != pinned:
        return _fail(
            f"generated code is made with grpcio-tools {pinned}, as setup.cfg says; {installed} is installed; "
            f"run: python -m pip install grpcio-tools=={pinned}"
        )

    with tempfile.TemporaryDirectory() as scratch:
        generated = generate(Path(scratch))
    present = {path.relative_to(ROOT).as_posix() for path in (ROOT / SOURCES).glob("*_pb2*.py*")}
    stale = sorted(name for name in generated.keys() | present if generated.get(name) != _read(ROOT / name))
    if check and stale:
        return _fail(f"out of date: {', '.join(stale)}; run: make proto")

    for name in stale:
        _write(ROOT / name, generated.get(name))
        print(f"{'wrote' if name in generated else 'removed'} {name}")
    return 0


def pinned_generator() -> str:
    """The release of grpcio-tools that the `dev` extra of setup.cfg pins."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    pin = re.search(r"^grpcio-tools\s*==\s*(\S+)$", setup["options.extras_require"]["dev"], re.MULTILINE)
    if pin is None:
        raise SystemExit("setup.cfg must pin grpcio-tools with == in its dev extra")
    return pin[1]


def generate(destination: Path) -> dict[str, str]:
    """Path relative to the repository's root -> text of each generated file; `destination` is scratch space."""
    # Imported here, so that a missing or wrong release is reported by `main` first.
    protoc = importlib.import_module("grpc_tools.protoc")
    includes = [f"-I{ROOT}", f"-I{Path(protoc.__file__ or '').parent / '_proto'}"]

    sources = sorted((ROOT / SOURCES).glob("*.proto"))
    services = [source for source in sources if re.search(r"^service\b", source.read_text(), re.MULTILINE)]
    runs = [
        ([f"--python_out={destination}", f"--pyi_out={destination}"], sources),
        ([f"--grpc_python_out={destination}"], services),
    ]
    for outputs, inputs in runs:
        if inputs and protoc.main(["protoc", *includes, *outputs, *map(str, inputs)]):
            raise SystemExit("protoc rejected a .proto file; its message is above")
    return {path.relative_to(destination).as_posix(): path.read_text() for path in destination.rglob("*.py*")}


def _read(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def _write(path: Path, text: str | None) -> None:
    if text is None:
        path.unlink()
    else:
        path.write_text(text)


def _fail(message: str) -> int:
    print(f"generate_proto: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
