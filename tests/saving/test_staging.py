"""Files and folders that appear when they are whole."""

import os
from pathlib import Path

import pytest

from autodist_py.saving.staging import staged


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_file_appears_with_all_that_was_written_beside_it(tmp_path: Path) -> None:
    with staged(str(tmp_path / "m.json")) as where:
        Path(where).write_text("index")
        Path(where).with_name("m_0.h5").write_text("part")
        assert names(tmp_path) and not (tmp_path / "m.json").exists()
    assert names(tmp_path) == ["m.json", "m_0.h5"]


def test_where_writing_raises_the_old_file_stays_and_nothing_else(tmp_path: Path) -> None:
    topology = tmp_path / "m.keras"
    topology.write_text("old")
    with pytest.raises(OSError) as raised, staged(str(topology)) as where:
        Path(where).write_text("half")
        raise OSError(28, "No space left on device", where)
    assert (names(tmp_path), topology.read_text(), raised.value.filename) == (["m.keras"], "old", str(topology))


def test_a_folder_takes_the_place_of_another_and_keeps_what_only_that_had(tmp_path: Path) -> None:
    (tmp_path / "m/variables").mkdir(parents=True)
    for name in ("README", "saved_model.pb", "variables/old", "variables/index"):
        (tmp_path / "m" / name).write_text("old")
    with staged(str(tmp_path / "m") + "/") as where:
        (Path(where) / "variables").mkdir(parents=True)
        for name in ("saved_model.pb", "variables/index"):
            (Path(where) / name).write_text("new")
    found = {name: (tmp_path / name).read_text() for name in names(tmp_path)}
    assert found == {
        "m/README": "old",
        "m/saved_model.pb": "new",
        "m/variables/old": "old",
        "m/variables/index": "new",
    }


def test_a_link_stays_and_what_it_names_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link.h5").symlink_to(tmp_path / "real/m.h5")
    with staged(str(tmp_path / "link.h5")) as where:
        Path(where).write_text("new")
    assert (tmp_path / "link.h5").is_symlink() and (tmp_path / "real/m.h5").read_text() == "new"


@pytest.mark.parametrize("path", ["gs://bucket/m.keras", "missing/m.keras", "/dev/null", "."])
def test_what_cannot_be_renamed_is_written_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    with staged(path) as where:
        assert where == path
    assert os.listdir(tmp_path) == []


def test_folders_are_made_for_a_writer_that_makes_them(tmp_path: Path) -> None:
    with staged(str(tmp_path / "exports/1"), makes_folders=True) as where:
        Path(where).mkdir()
    assert (tmp_path / "exports/1").is_dir()
