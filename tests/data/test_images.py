from __future__ import annotations

import random
from pathlib import Path

import pytest

from fulgurite.data import images
from fulgurite.data.images import IMAGE_ENDINGS, is_hidden, list_images
from fulgurite.data.spec import DataSpec
from fulgurite.errors import UserError

SPEC = DataSpec(("a", "b"), 1, 8, 8, (0.5,), (0.5,))


def make_files(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_images_are_found_at_any_depth_in_a_fixed_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["B.PNG", "a.png", "a/10.jpg", "a/9.JPEG", "a/b/c/1.webp", "b-1/x.tiff", "b/x.bmp", "ä.gif"]
    make_files(tmp_path, *names, "notes.txt", "a/png", "table.csv")

    def shuffled(*args: object, **options: object) -> list[tuple[str, list[str], list[str]]]:
        found = list(walk(*args, **options))
        random.Random(0).shuffle(found)
        return found

    found = list_images(tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in found] == [
        "B.PNG",
        "a/10.jpg",
        "a/9.JPEG",
        "a/b/c/1.webp",
        "a.png",
        "b/x.bmp",
        "b-1/x.tiff",
        "ä.gif",
    ]
    walk = images.os.walk  # type: ignore[attr-defined]  # the module's own import
    monkeypatch.setattr(images.os, "walk", shuffled)  # type: ignore[attr-defined]
    assert list_images(tmp_path) == found


def test_paths_start_as_the_folder_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_files(tmp_path, "photos/sub/a.png")
    monkeypatch.chdir(tmp_path)
    assert [str(path) for path in list_images(Path("photos"))] == [str(Path("photos/sub/a.png"))]
    assert [str(path) for path in list_images(Path())] == [str(Path("photos/sub/a.png"))]


def test_hidden_and_system_files_are_skipped(tmp_path: Path) -> None:
    kept = [".cache/photos/a.png", ".cache/photos/sub/b.png"]
    make_files(tmp_path, *kept)
    folder = tmp_path / ".cache" / "photos"  # a hidden folder above the given one hides nothing
    make_files(folder, ".ipynb_checkpoints/a.png", "._a.png", ".DS_Store", "Thumbs.db", "__MACOSX/a.png", "sub/@eaDir/a.png")
    assert [path.relative_to(tmp_path).as_posix() for path in list_images(folder)] == kept


def test_system_names() -> None:
    assert all(is_hidden(name) for name in (".ipynb_checkpoints", "._x.png", ".DS_Store", "Thumbs.db", "__MACOSX"))
    assert not any(is_hidden(name) for name in ("a.png", "_a.png", "cats", "a.b"))


def test_single_file_stands_for_itself(tmp_path: Path) -> None:
    make_files(tmp_path, "a.image", "b.png")
    assert list_images(tmp_path / "a.image") == [tmp_path / "a.image"]


def test_folder_with_the_name_of_an_image_is_no_image(tmp_path: Path) -> None:
    make_files(tmp_path, "odd.png/a.png")
    assert list_images(tmp_path) == [tmp_path / "odd.png" / "a.png"]


def test_links_to_folders_are_followed_but_not_in_circles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data"
    make_files(data, "a/1.png", "b/2.png")
    make_files(tmp_path, "elsewhere/3.png")
    for link, target in {
        "c": tmp_path / "elsewhere",
        "a/up": data,
        "a/root": tmp_path,
        "a/to_b": data / "b",
        "b/to_a": data / "a",
    }.items():
        (data / link).symlink_to(target)
    expected = ["a/1.png", "a/to_b/2.png", "b/2.png", "b/to_a/1.png", "c/3.png"]
    assert [path.relative_to(data).as_posix() for path in list_images(data)] == expected
    monkeypatch.chdir(data)
    assert [path.as_posix() for path in list_images(Path())] == expected


def test_missing_folder_names_the_nearest(tmp_path: Path) -> None:
    make_files(tmp_path, "photos/a/1.png")
    with pytest.raises(UserError, match=r"photoz does not exist \(did you mean 'photos'\?\)"):
        list_images(tmp_path / "photoz")
    with pytest.raises(UserError, match=r"photoz/a does not exist: there is no \S*photoz \(did you mean 'photos'\?\)"):
        list_images(tmp_path / "photoz" / "a")
    with pytest.raises(UserError, match=r"1\.png/a does not exist$"):
        list_images(tmp_path / "photos" / "a" / "1.png" / "a")


def test_folder_without_images_says_what_was_looked_for(tmp_path: Path) -> None:
    make_files(tmp_path, "a.txt", ".hidden/b.png")
    with pytest.raises(
        UserError, match=r"no images in .* and the folders below it; looked for files ending in \.bmp, \.gif, "
    ) as raised:
        list_images(tmp_path)
    assert all(ending in str(raised.value) for ending in IMAGE_ENDINGS)


def test_unreadable_folder_is_not_skipped_in_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_files(tmp_path, "a.png", "locked/b.png")
    scandir = images.os.scandir  # type: ignore[attr-defined]  # the module's own import

    def refusing(path: str) -> object:  # root can read every folder, so that permissions cannot be used here
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(images.os, "scandir", refusing)  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"cannot read \S*locked: Permission denied"):
        list_images(tmp_path)
