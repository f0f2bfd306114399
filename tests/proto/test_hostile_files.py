"""Files and texts of somebody else: nothing that they name is run, and only our own errors leave."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autodist_py.config.resource_spec import load_resource_spec, parse_resource_spec
from autodist_py.proto import strategy_pb2 as pb
from autodist_py.proto import synchronizers_pb2, wire
from autodist_py.proto.errors import AutoDistError, ResourceSpecError, StrategyError
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec, SSHConfig
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer, PSSynchronizer
from autodist_py.proto.values import load_value
from autodist_py.strategy_builders.from_file import FromFile

LOADERS: dict[str, Callable[[Path], object]] = {
    "Strategy.load": Strategy.load,
    "load_value": load_value,
    "FromFile": lambda path: FromFile(path).build(None, None),  # type: ignore[arg-type]  # It asks neither.
}
HOSTILE = [
    ("os:system", "command='touch {witness}'"),
    ("os:mkdir", "path='{witness}'"),
    ("pathlib:Path", ""),
    ("builtins:open", "file='{witness}', mode='w'"),
    ("os:system(command='touch {witness}')", ""),
    ("NoneCompressor", ")+__import__('os').mkdir('{witness}'"),
    ("HorovodCompressor", "dtype=__import__('os').mkdir('{witness}')"),
]


_OTHER = synchronizers_pb2.AllReduceSynchronizer.Compressor.Value("OtherCompressor")


def hostile(synchronizer: str, name: str, arguments: str, *, hashed: bool) -> pb.Strategy:
    message = pb.Strategy(graph_config={"replicas": ["127.0.0.1:CPU:0"]})
    target = getattr(message.node_config.add(var_name="w"), synchronizer)
    if synchronizer == "PSSynchronizer":
        target.reduction_destination = "127.0.0.1:CPU:0"
    target.compressor = _OTHER
    target.compressor_name, target.compressor_arguments = name, arguments
    if hashed:
        message.id = wire.content_hash(message)
    return message


@pytest.mark.parametrize("hashed", [False, True], ids=["no id", "id"])
@pytest.mark.parametrize("synchronizer", ["AllReduceSynchronizer", "PSSynchronizer"])
@pytest.mark.parametrize(("name", "arguments"), HOSTILE)
@pytest.mark.parametrize("suffix", [".json", ".pb"])
@pytest.mark.parametrize("loader", LOADERS)
def test_what_a_file_names_is_not_run(
    tmp_path: Path, loader: str, suffix: str, name: str, arguments: str, synchronizer: str, hashed: bool
) -> None:
    witness, path = tmp_path / "witness", tmp_path / f"evil{suffix}"
    message = hostile(synchronizer, name.format(witness=witness), arguments.format(witness=witness), hashed=hashed)
    wire.save(message, path, error=AutoDistError)
    with pytest.raises(AutoDistError):
        LOADERS[loader](path)
    assert not witness.exists()


@pytest.mark.parametrize("loader", LOADERS)
def test_a_module_that_a_file_names_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: str
) -> None:
    witness, path = tmp_path / "witness", tmp_path / "evil.json"
    (tmp_path / "lies_beside_it.py").write_text(f"open({str(witness)!r}, 'w')")
    monkeypatch.syspath_prepend(str(tmp_path))
    wire.save(hostile("PSSynchronizer", "lies_beside_it:Any", "", hashed=True), path, error=AutoDistError)
    with pytest.raises(AutoDistError, match="is read from a file"):
        LOADERS[loader](path)
    assert not witness.exists()


def test_the_refusal_says_how_a_compressor_is_registered(tmp_path: Path) -> None:
    path = tmp_path / "named.json"
    wire.save(hostile("AllReduceSynchronizer", "my:Own", "", hashed=True), path, error=AutoDistError)
    with pytest.raises(StrategyError, match=r"is read from a file, .* autodist_py\.compressors; got 'my:Own'"):
        Strategy.load(path)


@pytest.mark.parametrize("kind", [AllReduceSynchronizer, lambda **given: PSSynchronizer("a:CPU:0", **given)])
def test_what_is_no_compressor_is_not_called(tmp_path: Path, kind: Callable[..., Any]) -> None:
    witness = tmp_path / "witness"
    for text in (f"os:mkdir(path='{witness}')", f"builtins:open(file='{witness}', mode='w')", "pathlib:Path"):
        with pytest.raises(StrategyError, match="is no compressor, a frozen dataclass that has"):
            kind(compressor=text)
    assert not witness.exists()


def test_what_the_users_own_code_names_reaches_the_workers() -> None:
    strategy = Strategy((VariableStrategy("w", AllReduceSynchronizer(compressor=f"{__name__}:Own")),), ("a:CPU:0",))
    assert Strategy.from_proto(strategy.to_proto(), is_own=True) == strategy
    with pytest.raises(StrategyError, match="is read from a file"):
        Strategy.from_proto(strategy.to_proto())


@dataclass(frozen=True)
class Own:
    passes_through: ClassVar[bool] = False
    gathers: ClassVar[bool] = False
    sums_first: ClassVar[bool] = False
    keeps_state: ClassVar[bool] = False
    codes_rows: ClassVar[bool] = False
    gives_up: ClassVar[str] = "nothing"

    def travels_as(self, dtype: str) -> str:
        return dtype

    def wire_bytes(self, shape: tuple[int, ...], item: int) -> int:
        return item


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{letter}: &{letter} [{','.join([f'*{before}'] * 9)}]\n"
    for before, letter in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "nodes: [{address: 2026-13-45}]",
            "line 1: YAML takes '2026-13-45' for a value of tag:yaml.org,2002:timestamp",
        ),
        ("nodes: [{address: !!int abc}]", "line 1: YAML takes 'abc' for"),
        ("nodes: [{address: !!bool abc}]", "line 1: YAML takes 'abc' for"),
        (f"nodes: [{{address: {'9' * 6000}}}]", "line 1: YAML takes '9999"),
        (f"nodes: [{{address: 0x{'f' * 4000}}}]", "line 1: YAML takes '0xff"),
        (f"nodes: [{{address: a, network_bandwidth: 0b{'1' * 1025}}}]", "line 1: YAML takes '0b11"),
        (f"nodes: [{{address: a, cpus: [{'59:' * 3000}59]}}]", "line 1: YAML takes '59:59"),
        ("[" * 100_000, "nested too deeply"),
        ("{" * 100_000, "nested too deeply"),
        ("- " * 100_000, "nested too deeply"),
        (BOMB, "at most 20000 values"),
        ("&a [*a]", "part of itself"),
        ("nodes: &a [{address: *a}]", "part of itself"),
    ],
    ids=lambda value: value[:20],
)
def test_a_hostile_yaml_is_refused(text: str, said: str) -> None:
    with pytest.raises(AutoDistError, match=said):
        parse_resource_spec(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"nodes": ' * 10_000, "nested too deeply"),
        (f'{{"nodes": [{{"address": {"9" * 6000}}}]}}', "in .json form"),
        (f'{{"nodes": [{{"network_bandwidth": 1{"0" * 400}}}]}}', "in .json form"),
        ('{"nodes": [], "nodes": []}', "the key 'nodes' comes twice"),
        ('{"\\ud800": 1}', "in .json form"),
        ('{"nodes": [{"address": "\\ud800"}]}', "in .json form"),
        (f'{{"{"n" * 300_000}": 1}}', "more than 262144 bytes"),
    ],
    ids=lambda value: value[:20],
)
def test_a_hostile_json_is_refused_in_words_that_can_be_printed(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "spec.json"
    path.write_text(text)
    with pytest.raises(AutoDistError, match=said) as refusal:
        load_resource_spec(path)
    assert str(refusal.value).encode()


@pytest.mark.parametrize(
    ("load", "suffix"), [(load_resource_spec, ".json"), (load_resource_spec, ".yaml"), (Strategy.load, ".json")]
)
def test_the_one_key_that_comes_twice_is_found_soon(
    tmp_path: Path, load: Callable[[Path], object], suffix: str
) -> None:
    keys = [f'"{number}": 1' for number in range(9_000 if suffix == ".yaml" else 20_000)]
    path = tmp_path / f"twice{suffix}"
    path.write_text(f"{{{', '.join([*keys, keys[-1]])}}}")
    begin = time.thread_time()
    with pytest.raises(AutoDistError, match=f"the key '{len(keys) - 1}' comes twice in one map"):
        load(path)
    assert time.thread_time() - begin < 5.0


@pytest.mark.parametrize(
    "address", ["::1%$(touch x)", "fe80::1%a b", "fe80::1%a\nb", "fe80::1%", "fe80::1%;x", "fe80::1%a%b"]
)
def test_a_zone_of_an_address_names_an_interface_alone(address: str) -> None:
    """Ssh's configuration may give what it is told to a shell: CVE-2023-51385."""
    with pytest.raises(ResourceSpecError, match="an address is an IP address or a host name"):
        ResourceSpec((NodeSpec(address),))


def test_a_zone_may_name_an_interface() -> None:
    assert ResourceSpec((NodeSpec("fe80::1%eth0.1"),)).chief.address == "fe80::1%eth0.1"


@pytest.mark.parametrize("name", ["-oProxyCommand=x", "$(touch x)", "a;b", "a b", "a\nb", "`x`", "a'b", "x\\"])
def test_a_username_has_nothing_that_a_shell_would_run(name: str) -> None:
    with pytest.raises(ResourceSpecError, match=r"ssh\.lab\.username: a username has no spaces, quotes"):
        ResourceSpec((NodeSpec("host"),), (("lab", SSHConfig(name)),))


@pytest.mark.parametrize("name", ["", "ada", "ada.l-1", "ada@example.org", "EXAMPLE\\ada", "host$", "å_da"])
def test_other_usernames_are_taken(name: str) -> None:
    assert ResourceSpec((NodeSpec("host"),), (("lab", SSHConfig(name)),)).ssh[0][1].username == name


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.sampled_from([".json", ".pb", ".yaml"]))
def test_bytes_of_any_kind_raise_our_errors_alone(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, suffix: str
):
    path = tmp_path_factory.getbasetemp() / f"any{suffix}"
    path.write_bytes(content)
    for load in (load_resource_spec, *([load_value] if suffix != ".yaml" else [])):
        try:
            load(path)
        except AutoDistError as refusal:
            assert str(refusal).encode()


JSON = json.dumps(
    wire.to_plain(
        Strategy(
            (
                VariableStrategy("w", AllReduceSynchronizer(compressor="TopKCompressor(ratio=0.5)"), "2"),
                VariableStrategy("v", PSSynchronizer("a")),
            ),
            ("127.0.0.1:CPU:0",),
        )._anonymous_proto()
    )
)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(JSON) - 1), st.text(max_size=4), st.integers(0, 6))
def test_a_strategy_that_was_edited_loads_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, topology: int, text: str, cut: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "edited.json"
    path.write_bytes((JSON[:topology] + text + JSON[topology + cut :]).encode("utf-8", "surrogatepass"))
    try:
        Strategy.load(path)
    except AutoDistError as refusal:
        assert str(refusal).encode()
