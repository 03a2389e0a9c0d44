"""Break a checkpoint's file, or the archive that it is."""

from __future__ import annotations

import io
import random
import struct
import zipfile
from collections.abc import Iterator


def changed_bytes(intact: bytes, rng: random.Random, count: int) -> Iterator[tuple[str, bytes]]:
    head, tail = 3000, max(len(intact) - 6000, 0)  # where the pickle and the table of the parts are
    for number in range(count):
        data = bytearray(intact)
        at = rng.choice([rng.randrange(len(data)), rng.randrange(head), rng.randrange(tail, len(data))])
        kind = rng.choice(["flip", "flips", "cut", "insert", "delete", "zero", "ones", "move", "double"])
        length = rng.choice([1, 2, 4, 8, 64, 1000])
        if kind == "flip":
            data[at] ^= 1 << rng.randrange(8)
        elif kind == "flips":
            for _ in range(length):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            del data[at:]
        elif kind == "insert":
            data[at:at] = rng.randbytes(length)
        elif kind == "delete":
            del data[at : at + length]
        elif kind in ("zero", "ones"):
            data[at : at + length] = (b"\0" if kind == "zero" else b"\xff") * length
        elif kind == "move":
            data[at : at + length] = data[rng.randrange(len(data)) :][:length]
        else:
            data += data[at:]
        yield f"{number} {kind} {at} {length}", bytes(data)


def parts_of(content: bytes) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


def archive_of(parts: list[tuple[str, bytes]], compression: int = zipfile.ZIP_STORED) -> bytes:
    """Write parts as PyTorch does: neither dates nor attributes; a right checksum."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in parts:
            part = zipfile.ZipInfo(name)
            part.compress_type = compression
            archive.writestr(part, data)
            part.external_attr = 0  # comes into the table of the parts, which is written last
    return buffer.getvalue()


def changed_archives(intact: bytes, rng: random.Random, count: int) -> Iterator[tuple[str, bytes]]:
    names = ["data.pkl", "version", "byteorder", ".data/serialization_id", "constants.pkl", ".storage_alignment", "code/x.py"]
    for number in range(count):
        parts = parts_of(intact)
        place = rng.randrange(len(parts))
        name, data = parts[place]
        top = name.partition("/")[0]
        kind = rng.choice(["rename", "drop", "double", "compress", "fill", "add", "sizes", "swap", "shuffle", "folder"])
        compression = zipfile.ZIP_STORED
        if kind == "rename":
            other = rng.choice(
                [f"{top}/{rng.choice(names)}", "../../etc/x", "/tmp/x", "", "x" * 60000, f"{top}/DATA.PKL", f"{top}\\data.pkl"]
            )
            parts[place] = (other, data)
        elif kind == "drop":
            del parts[place]
        elif kind == "double":
            parts.insert(rng.randrange(len(parts)), (name, rng.choice([data, data[:-1], b"", rng.randbytes(50)])))
        elif kind == "compress":
            compression = rng.choice([zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
        elif kind == "fill":
            parts[place] = (
                name,
                rng.choice([b"", b"\0" * 10, rng.randbytes(len(data)), data + b"x", data[: len(data) // 2], b"big"]),
            )
        elif kind == "add":
            parts.append((f"{top}/{rng.choice(names)}", rng.choice([b"", b"1", b"999999999999", b"big", b"\x80\x02}."])))
        elif kind == "swap":
            target = rng.randrange(len(parts))
            parts[place], parts[target] = (name, parts[target][1]), (parts[target][0], data)
        elif kind == "shuffle":
            rng.shuffle(parts)
        elif kind == "folder":
            parts[place] = (f"other/{name.partition('/')[2]}", data)
        content = bytearray(archive_of(parts, compression))
        if kind == "sizes":
            start = content.rindex(b"PK\x01\x02") if rng.random() < 0.5 else content.index(b"PK\x01\x02")
            field = start + rng.choice([10, 16, 20, 24, 28, 30, 32, 38, 42])
            struct.pack_into(
                "<I", content, field, rng.choice([0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 0xFFFFFFFE, len(content), len(content) * 2])
            )
        yield f"{number} {kind} {name}", bytes(content)
