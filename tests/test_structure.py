"""What the folders promise: one package through links, TensorFlow's private modules in adapters, light imports."""

import ast
import configparser
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import autodist_py
from tools.mutate import mutations

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("kernel", "proto", "strategy_builders")
LIBRARY = ("autodist_py", *LINKED)
EVERYTHING = (*LIBRARY, "tests", "examples", "benchmarks", "tools")


def sources(folders: tuple[str, ...]) -> Iterator[Path]:
    """The hand-written Python files of the folders, each once, relative to the root."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not path.stem.endswith(("_pb2", "_pb2_grpc")) and path.resolve() == path:
                yield path.relative_to(ROOT)


def imported_modules(path: Path) -> Iterator[str]:
    """The modules that the file imports, anywhere in it; relative ones with their dots."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def test_the_folders_are_packages_of_autodist_py_through_relative_links():
    for name in LINKED:
        link = ROOT / "autodist_py" / name
        assert link.is_symlink()
        assert link.readlink() == Path("..") / name


def test_every_deliberate_fault_can_still_be_made():
    faults = list(mutations())
    assert [fault.number for fault in faults] == list(range(1, len(faults) + 1))
    assert [fault.title for fault in faults if (ROOT / fault.file).read_text().count(fault.old) != 1] == []


def test_nothing_imports_the_folders_by_their_bare_names():
    bare = [
        f"{path}: {module}"
        for path in sources(EVERYTHING)
        for module in imported_modules(path)
        if any(is_in(module, name) for name in LINKED)
    ]
    assert bare == []


def test_nothing_imports_a_test_module():
    """What tests share is in tests/support. Workers import what a test hands them, by its name, and scripts as text."""
    found = [f"{path}: {line}" for path in sources(("tests",)) for line in imports_of_tests((ROOT / path).read_text())]
    assert found == []


def imports_of_tests(text: str) -> list[str]:
    """The lines that import a test module, in scripts within the text, too."""
    return re.findall(r"^ *(?:from|import) +tests[.\w]*(?:\.test_\w+.*| import .*\btest_.*)$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("line", "is_one"),
    [
        ("from tests.oracle.test_fit import OPTIMIZERS", True),
        ("    from tests.kernel import test_flaws as flaws", True),
        ("import tests.oracle.test_fit", True),
        ("from tests.support.fit_oracle import OPTIMIZERS", False),
        ("from tests.lab.conftest import Lab", False),
    ],
)
def test_an_import_of_a_test_module_is_seen(line, is_one):
    assert bool(imports_of_tests(f"import re\n{line}\n")) == is_one


def test_private_modules_of_tensorflow_are_used_in_tf_adapters_only():
    private = [
        f"{path}: {module}"
        for path in sources((*LIBRARY, "examples"))
        if path.name != "tf_adapter.py"
        for module in imported_modules(path)
        if is_in(module, "tensorflow.python") or is_in(module, "tensorflow.core") or is_in(module, "keras.src")
    ]
    assert private == []


def test_what_ends_with_the_process_is_in_one_stack():
    registering = [str(path) for path in sources(LIBRARY) if "atexit.register(" in (ROOT / path).read_text()]
    assert registering == ["autodist_py/cluster/exit_stack.py"]
    lines = [line.strip() for path in sources(LIBRARY) for line in (ROOT / path).read_text().splitlines()]
    finalizers = [line for line in lines if line.startswith("weakref.finalize(")]
    assert len(finalizers) == 3
    before_the_stack = [line for line in finalizers if not line.endswith(".atexit = False")]
    assert before_the_stack == []


def test_library_code_has_no_assert_statement():
    asserts = [
        f"{path}:{node.lineno}"
        for path in sources(LIBRARY)
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.Assert)
    ]
    assert asserts == []


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join((() if parts[0] == "autodist_py" else ("autodist_py",)) + parts).removesuffix(".__init__")


LIGHT = sorted(
    [
        "autodist_py",
        "autodist_py.cli",
        "autodist_py.config.resource_spec",
        "autodist_py.config.settings",
        *(module_name(path) for path in sources(("proto", "strategy_builders"))),
        *(module_name(path.relative_to(ROOT)) for path in (ROOT / "proto").glob("*_pb2*.py")),
    ]
)


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("\n".join(f"import {name}" for name in LIGHT), id="light modules"),
        pytest.param("from autodist_py import AutoDistError, GraphItem, ResourceSpec, Strategy", id="public values"),
        pytest.param("from autodist_py.cli import main; main(['--help'], standalone_mode=False)", id="--help"),
        pytest.param(
            "from autodist_py.cli import main; main(['run', '--help'], standalone_mode=False)", id="run --help"
        ),
    ],
)
def test_tensorflow_is_not_imported_by(code):
    heavy = "print(*sorted({'tensorflow', 'keras', 'tf_keras'} & set(sys.modules)), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\n{heavy}"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr.strip()) == (0, "")


def test_every_public_name_can_be_imported():
    for name in autodist_py.__all__:
        assert getattr(autodist_py, name).__name__ == name


def test_a_name_that_is_not_public_is_an_error_that_lists_what_is():
    misspelt = "AutoDits"
    with pytest.raises(AttributeError, match="no attribute 'AutoDits'; it has AutoDist,"):
        getattr(autodist_py, misspelt)


def test_pyproject_holds_the_build_system_and_tool_tables_only():
    assert set(tomllib.loads((ROOT / "pyproject.toml").read_text())) == {"build-system", "tool"}


def test_every_registered_builder_exists():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options.entry_points"]["autodist_py.strategy_builders"].strip().splitlines()
    for line in lines:
        name, _, target = (part.strip() for part in line.partition("="))
        module, _, attribute = target.partition(":")
        assert getattr(__import__(module, fromlist=[attribute]), attribute).__name__ == name


def test_the_installed_package_includes_the_folders_and_nothing_under_their_bare_names(tmp_path):
    code = "from importlib.util import find_spec; print([find_spec(name) is not None for name in %r])"
    names = [*(f"autodist_py.{name}" for name in LINKED), *LINKED]
    done = subprocess.run(
        [sys.executable, "-c", code % names], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == str([True] * len(LINKED) + [False] * len(LINKED)), done.stderr


def test_wheel_and_sdist_contain_the_folders_as_packages_of_autodist_py(tmp_path):
    tree = copied_tree(tmp_path / "tree")
    names = packaged(built_wheel(tree, tmp_path / "from_tree"))
    assert packaged(built_wheel(built_sdist(tree, tmp_path), tmp_path / "from_sdist")) == names

    code = {path if path.parts[0] == "autodist_py" else "autodist_py" / path for path in sources(LIBRARY)}
    data = {"autodist_py/py.typed", "autodist_py/proto/strategy.proto", "autodist_py/proto/strategy_pb2.pyi"}
    assert {str(path) for path in code} | data <= names
    assert {name.split("/")[0] for name in names} == {"autodist_py"}


def copied_tree(tree: Path) -> Path:
    """What is packaged, in a folder of its own: a build leaves files in the tree it is made from."""
    tree.mkdir()
    for name in LIBRARY:
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    return tree


def built_sdist(tree: Path, folder: Path) -> Path:
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    command = [sys.executable, "-c", code, str(folder)]
    subprocess.run(command, cwd=tree, check=True, capture_output=True, timeout=200)
    (sdist,) = folder.glob("autodist_py-*.tar.gz")
    return sdist


def built_wheel(source: Path, folder: Path) -> Path:
    options = ["--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(folder), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=200)
    (wheel,) = folder.glob("autodist_py-*.whl")
    return wheel


def packaged(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_what_bears_nothing_beside_it_fails_in_one_of_several_processes():
    a_test = "tests/cluster/launch/test_local.py::test_an_ipv6_address_stands_in_brackets_before_its_port"
    command = [sys.executable, "-m", "pytest", "-n", "1", a_test]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "is marked `alone`, and others run beside it" in done.stdout
