from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from fulgurite.data import cache, cache_file, decode_split
from fulgurite.data.cache import ImageCache, build_cache
from fulgurite.data.decode import decode_image
from fulgurite.data.files import FileDataset
from fulgurite.data.paths import Paths
from fulgurite.data.spec import DataSpec
from fulgurite.data.windows import whole
from fulgurite.errors import UserError

SPEC = DataSpec(("a", "b"), 3, 16, 16, (0.5,) * 3, (0.5,) * 3)
GREY = replace(SPEC, channels=1, mean=(0.5,), std=(0.5,))
KINDS = pytest.mark.parametrize("kind", ["ram", "disk"])
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    """Return images of several shapes, formats and channels: more than a worker hands over at once."""
    folder = tmp_path / "images"
    folder.mkdir()
    generator = np.random.default_rng(0)
    paths = []
    for number, (height, width) in enumerate([(20, 30), (30, 20), (16, 16), (9, 40), (64, 48)] * 2):
        shape = (height, width) if number % 3 == 0 else (height, width, 3)
        paths.append(folder / f"{number}.{'png' if number % 2 else 'jpg'}")
        Image.fromarray(generator.integers(0, 256, shape, dtype=np.uint8)).save(paths[-1])
    return paths


@pytest.fixture
def build(tmp_path: Path, images: list[Path]) -> Callable[..., ImageCache]:
    """Return build_cache for these images, which keeps its files in a folder of a name that is not plain."""

    def built(kind: Literal["ram", "disk"] = "disk", paths: list[Path] = images, **options: Any) -> ImageCache:
        options = {"split": "val", "shorter": None, "folder": kept(tmp_path), "workers": 0, "skip": False} | options
        return build_cache(kind, Paths(paths), options.pop("spec", SPEC), **options)

    return built


def kept(tmp_path: Path) -> Path:
    return tmp_path / "мои кэши" / "日本"


def files(tmp_path: Path) -> list[Path]:
    """Return what builds left in the folder, but for the files that are locked."""
    return [path for path in sorted(kept(tmp_path).iterdir()) if path.suffix != ".lock"]


def damage(path: Path) -> str:
    """Cut an image file off behind its header; return what is said of it."""
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(UserError) as error:
        decode_image(path, SPEC)
    return str(error.value)


@KINDS
@pytest.mark.parametrize("spec", [SPEC, GREY], ids=["rgb", "grey"])
def test_evaluation_gets_the_very_bits_of_the_decoder(build: Any, images: list[Path], kind: str, spec: DataSpec) -> None:
    decoded = build(kind, spec=spec)
    for index, path in enumerate(images):
        assert torch.equal(decoded(index), decode_image(path, spec))
        assert decoded(index).stride() == (1, 16 * spec.channels, spec.channels)


@KINDS
def test_training_gets_whole_images_small_enough_to_cut_crops_from(build: Any, images: list[Path], kind: str) -> None:
    decoded = build(kind, shorter=18)
    shapes = [tuple(decoded(index).shape) for index in range(5)]
    assert shapes == [(3, 18, 27), (3, 27, 18), (3, 16, 16), (3, 9, 40), (3, 24, 18)]
    for index, path in enumerate(images):
        assert torch.equal(decoded(index), decode_image(path, SPEC, partial(whole, shorter=18)))


@KINDS
def test_what_the_data_set_gives_may_be_written_to(build: Any, images: list[Path], kind: str) -> None:
    decoded = build(kind)
    dataset: Any = FileDataset(Paths(images), torch.zeros(len(images)), SPEC, cache=decoded)
    before = dataset[0][0].clone()
    dataset[0][0].zero_()  # as a user's transform may do
    assert torch.equal(dataset[0][0], before)


@KINDS
def test_samples_listed_twice_and_none(build: Any, images: list[Path], kind: str) -> None:
    twice = build(kind, [images[0], images[1], images[0]])
    assert torch.equal(twice(2), decode_image(images[0], SPEC))
    assert len(build(kind, []).places) == 0
    assert len(build(kind, []).places) == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_build_with_workers_says_the_same_and_draws_no_random_numbers(
    build: Any, images: list[Path], capsys: pytest.CaptureFixture[str], workers: int
) -> None:
    state = torch.get_rng_state()
    decoded = build("ram", split="train", shorter=18, workers=workers)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(decoded(9), decode_image(images[9], SPEC, partial(whole, shorter=18)))
    expected = "cache       0.0 MiB in memory for 10 images of the train split\ncache       decoded in 0 s\n"
    assert capsys.readouterr().out == expected


@KINDS
def test_too_little_room_is_known_before_an_image_is_decoded(build: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    free = 10 * 16 * 16 * 3  # the images, and no byte for anything else
    monkeypatch.setattr(cache, "available_memory", lambda: free)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free))
    monkeypatch.setattr(decode_split, "decode_image", None)
    with pytest.raises(UserError) as error:
        build(kind)
    where, share, advice = {
        "ram": ("memory", "80%", "cache: disk keeps them in a file"),
        "disk": ("disk", "95%", "cache_dir names a folder elsewhere"),
    }[kind]
    assert str(error.value) == (
        f"the decoded images of the val split take 0.0 MiB; of the 0.0 MiB of {where} that are free {share} may be used. "
        f"{advice}, a smaller size makes them smaller, cache: none decodes them in each epoch"
    )


@KINDS
@pytest.mark.parametrize("workers", [0, 2])
def test_image_that_cannot_be_read_stops_the_build(
    build: Any, images: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, workers: int
) -> None:
    reason = damage(images[8])
    with pytest.raises(UserError) as error:
        build(kind, workers=workers)
    assert str(error.value) == reason
    assert kind == "ram" or files(tmp_path) == []
    images[3].unlink()
    monkeypatch.setattr(decode_split, "decode_image", None)  # a header is read before any image is decoded
    with pytest.raises(UserError) as error:
        build(kind, workers=workers)
    assert str(error.value) == f"cannot read {images[3]}: No such file or directory"


@KINDS
@pytest.mark.parametrize("workers", [0, 2])
def test_image_that_cannot_be_read_is_skipped(build: Any, images: list[Path], kind: str, workers: int) -> None:
    images[2].write_bytes(b"text")
    reasons = {2: f"{images[2]}: not an image, or of a format that PIL does not read", 8: damage(images[8])}
    for _ in range(2):  # the second time from the file
        decoded = build(kind, skip=True, workers=workers)
        for index, path in enumerate(images):
            if index in reasons:
                with pytest.raises(UserError) as error:
                    decoded(index)
                assert str(error.value) == reasons[index]
            else:
                assert torch.equal(decoded(index), decode_image(path, SPEC))
    with pytest.raises(UserError) as error:
        build(kind)
    assert str(error.value) == reasons[2]


def test_file_is_used_again(
    build: Any, images: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build()
    (file,) = files(tmp_path)
    assert capsys.readouterr().out.startswith(f"cache       0.0 MiB in {file} for 10 images of the val split\n")
    expected = decode_image(images[1], SPEC)
    monkeypatch.setattr(decode_split, "decode_image", None)
    monkeypatch.setattr(decode_split, "image_size", None)
    assert torch.equal(build(spec=replace(SPEC, class_names=("other",)))(1), expected)
    assert capsys.readouterr().out == f"cache       10 decoded images of the val split found in {file}\n"


@pytest.mark.parametrize("change", ["pixels", "time", "library"])
def test_file_of_changed_images_is_made_anew(
    build: Any,
    images: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: str,
) -> None:
    build()
    (file,) = files(tmp_path)
    if change == "pixels":
        state = images[1].stat()
        Image.new("RGB", (31, 31)).save(images[1])
        os.utime(images[1], ns=(state.st_atime_ns, state.st_mtime_ns))
    elif change == "time":
        os.utime(images[1], ns=(0, images[1].stat().st_mtime_ns + 1))
    else:
        monkeypatch.setattr("PIL.__version__", "0")
    capsys.readouterr()
    assert torch.equal(build()(1), decode_image(images[1], SPEC))
    told = f"cache       {file} is made anew: the image files, or the libraries that decode them, have changed since\n"
    assert capsys.readouterr().out.startswith(told)
    assert files(tmp_path) == [file]
    assert build().file == (file, build().file[1])


def test_other_settings_have_a_file_of_their_own(build: Any, images: list[Path], tmp_path: Path) -> None:
    build()
    build(spec=replace(SPEC, background=(0, 0, 0)))
    build(spec=replace(SPEC, height=8))
    build(spec=GREY)
    build(spec=replace(SPEC, max_pixels=5000))
    build(shorter=8)
    build(paths=images[:-1])
    build(split="train")
    assert len(files(tmp_path)) == 8


@pytest.mark.parametrize("damaged", ["empty", "short", "cut", "longer", "zeros"])
def test_damaged_file_is_made_anew(
    build: Any, images: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], damaged: str
) -> None:
    build()
    (file,) = files(tmp_path)
    content = file.read_bytes()
    contents = {"empty": b"", "short": content[:20], "cut": content[:-1], "longer": content + b"\0", "zeros": bytes(len(content))}
    file.write_bytes(contents[damaged])
    capsys.readouterr()
    assert torch.equal(build()(9), decode_image(images[9], SPEC))
    assert capsys.readouterr().out.startswith(f"cache       {file} is made anew: it is damaged\n")
    assert file.read_bytes() == content


def test_folder_that_cannot_be_made(build: Any, images: list[Path]) -> None:
    with pytest.raises(
        UserError, match=r"^cannot keep the decoded images of the val split in .*: Not a directory; cache_dir nam"
    ):
        build(folder=images[0] / "cache")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folder_that_cannot_be_written_to_will_do_for_reading(build: Any, images: list[Path], tmp_path: Path) -> None:
    build()
    kept(tmp_path).chmod(0o500)
    try:
        assert torch.equal(build()(0), decode_image(images[0], SPEC))
        with pytest.raises(
            UserError, match=r"^cannot keep the decoded images of the val split in .*: Permission denied; cache_dir"
        ):
            build(shorter=8)
    finally:
        kept(tmp_path).chmod(0o700)


def test_disk_that_gets_full_leaves_nothing_behind(build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    # Not by a limit on this process: what pytest itself writes to would be limited, too.
    monkeypatch.setattr(cache_file.FileWriter, "add", full)
    text = r"^cannot keep the decoded images of the val split in .*: No space left on device; cache_dir names"
    with pytest.raises(UserError, match=text):
        build()
    assert files(tmp_path) == []


def slow(path: Path, *args: Any, log: Path, seconds: float) -> Tensor:
    with log.open("a") as file:
        file.write(f"{path.name}\n")
    time.sleep(seconds)
    return decode_image(path, *args)


def test_build_that_was_killed_leaves_nothing_that_is_used(
    build: Any, images: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(decode_split, "decode_image", partial(slow, log=tmp_path / "log", seconds=0.1))
        process = FORK.Process(target=build, kwargs={"paths": images * 100})
        process.start()
    while not (kept(tmp_path).exists() and any(path.suffix == ".unfinished" for path in files(tmp_path))):
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    (leftover,) = files(tmp_path)
    decoded = build(paths=images * 100)
    assert files(tmp_path) == [leftover.with_suffix("")]
    assert all(torch.equal(decoded(index), decode_image(path, SPEC)) for index, path in enumerate(images * 100))


def test_two_builds_at_once_decode_once(
    build: Any, images: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def use() -> None:
        decoded = build()
        os._exit(0 if all(torch.equal(decoded(index), decode_image(path, SPEC)) for index, path in enumerate(images)) else 1)

    monkeypatch.setattr(decode_split, "decode_image", partial(slow, log=tmp_path / "log", seconds=0.05))
    processes = [FORK.Process(target=use) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert (tmp_path / "log").read_text().split() == [path.name for path in images]
    (file,) = files(tmp_path)
    out = capfd.readouterr().out
    assert out.count(f"cache       waiting for the process that makes {file}\n") == 1
    assert out.count("10 decoded images of the val split found in") == 1


def test_pickled_cache_is_a_path(build: Any, images: list[Path], tmp_path: Path) -> None:
    decoded = build()
    pickled = pickle.dumps(decoded)
    assert len(pickled) < 300 + len(str(tmp_path))
    assert torch.equal(pickle.loads(pickled)(3), decoded(3))
    os.utime(images[1], ns=(0, 0))
    build()
    with pytest.raises(UserError, match=r"^cannot open the decoded images in .* once more: the image files, or the libraries"):
        pickle.loads(pickled)
    assert torch.equal(decoded(3), decode_image(images[3], SPEC))  # what is open stays what it was


def private_memory() -> int:
    """Return the memory in KiB that this process shares with no other."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


class Growth:
    """Read all images of a cache; give by how much this process's private memory grew, in KiB."""

    def __init__(self, decoded: ImageCache) -> None:
        self.decoded = decoded

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        before = private_memory()
        for place in range(len(self.decoded.places)):
            self.decoded(place)
        return private_memory() - before


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="Linux only")
def test_forked_worker_shares_the_memory(build: Any, images: list[Path]) -> None:
    decoded = build("ram", images[:1] * 200, spec=replace(SPEC, height=256, width=256))
    assert decoded.pixels.numel() == 200 * 3 * 2**16  # 37.5 MiB
    (grown,) = DataLoader[Any](Growth(decoded), batch_size=None, num_workers=1, multiprocessing_context="fork")  # type: ignore[arg-type]
    assert grown < 4 * 1024


class Samples:
    """A data set of what is in a cache."""

    def __init__(self, decoded: ImageCache) -> None:
        self.decoded = decoded

    def __len__(self) -> int:
        return len(self.decoded.places)

    def __getitem__(self, index: int) -> Tensor:
        return self.decoded(index)


@pytest.fixture
def start_method(method: str) -> Iterator[None]:
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method(method, force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@KINDS
@pytest.mark.parametrize(("method", "workers"), [("fork", 2), pytest.param("spawn", 1, marks=pytest.mark.slow)])
def test_workers_build_and_read(build: Any, images: list[Path], start_method: None, kind: str, workers: int) -> None:
    decoded = build(kind, shorter=18, workers=workers)
    loader = DataLoader[Any](Samples(decoded), batch_size=None, num_workers=workers)  # type: ignore[arg-type]
    expected = [decode_image(path, SPEC, partial(whole, shorter=18)) for path in images]
    assert all(torch.equal(*pair) for pair in zip(loader, expected, strict=True))


def test_an_image_that_can_be_read_again_is_taken_in(build: Any, images: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    whole_file, state = images[2].read_bytes(), images[2].stat()
    images[2].write_bytes(bytes(len(whole_file)))
    os.utime(images[2], ns=(state.st_atime_ns, state.st_mtime_ns))
    assert 2 in build(skip=True).broken
    images[2].write_bytes(whole_file)
    os.utime(images[2], ns=(state.st_atime_ns, state.st_mtime_ns))  # as when a network disk is back
    capsys.readouterr()
    assert torch.equal(build(skip=True)(2), decode_image(images[2], SPEC))
    assert "1 images that could not be read can be now" in capsys.readouterr().out


def test_relative_paths_mean_other_files_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = []
    for number, name in enumerate(("one", "two")):
        (tmp_path / name).mkdir()
        Image.new("RGB", (16, 16), (number, 0, 0)).save(tmp_path / name / "x.bmp")
        os.utime(tmp_path / name / "x.bmp", (1, 1))
        monkeypatch.chdir(tmp_path / name)
        options: dict[str, Any] = {"split": "val", "shorter": None, "folder": tmp_path, "workers": 0, "skip": False}
        caches.append(build_cache("disk", Paths(["x.bmp"]), SPEC, **options))
    assert [cached(0)[0, 0, 0].item() for cached in caches] == [0, 1]


@pytest.mark.parametrize("place", ["table", "reasons"])
def test_damage_within_a_file_of_the_right_length(build: Any, tmp_path: Path, images: list[Path], place: str) -> None:
    images[1].write_bytes(b"text")
    build(skip=True)
    (file,) = kept(tmp_path).glob("*.images")
    content = bytearray(file.read_bytes())
    table = 96  # bytes from the start: behind the header
    if place == "table":
        content[table : table + 64] = b"\xff" * 64
    else:
        content[-5:] = b"}}}}}"
    file.write_bytes(content)
    assert torch.equal(build(skip=True)(0), decode_image(images[0], SPEC))
