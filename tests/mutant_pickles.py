"""Put pickles into a checkpoint with which somebody could mean harm."""

from __future__ import annotations

import pickle
import pickletools
import random
import struct
from collections.abc import Iterator

from tests.mutant_files import archive_of, parts_of

CANARY = "canary_of_fuzzing"


def with_pickle(intact: bytes, pickled: bytes) -> bytes:
    return archive_of([(name, pickled if name.endswith("/data.pkl") else data) for name, data in parts_of(intact)])


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + b"(" + b"".join(arguments) + b"tR"


def storage(key: str = "0", numel: int = 36, kind: str = "FloatStorage", location: str = "cpu") -> bytes:
    return b"(" + text("storage") + name("torch", kind) + text(key) + text(location) + whole(numel) + b"tQ"


def whole(value: int) -> bytes:
    data = pickle.encode_long(value)
    return b"\x8a" + bytes([len(data)]) + data


def tensor(sizes: tuple[int, ...], strides: tuple[int, ...], *, offset: int = 0, of: bytes = b"") -> bytes:
    shape = [b"(" + b"".join(map(whole, numbers)) + b"t" for numbers in (sizes, strides)]
    hooks = call(name("collections", "OrderedDict"))
    return call(name("torch._utils", "_rebuild_tensor_v2"), of or storage(), whole(offset), *shape, b"\x89", hooks)


def hostile_values() -> dict[str, bytes]:
    """Return pickles of one value each that somebody could mean harm with."""
    shared = b")q\x00" + b"".join(b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86q" + bytes([n + 1]) for n in range(60))
    canary = name(CANARY, "run")
    return {
        "os.system": call(name("os", "system"), text("touch ran")),
        "posix.system": call(name("posix", "system"), text("touch ran")),
        "eval": call(name("builtins", "eval"), text("open('ran', 'w')")),
        "import": canary,
        "call": call(canary),
        "getattr": call(name("builtins", "getattr"), name("os", "system"), text("x")),
        "functools.partial": call(name("functools", "partial"), name("os", "system")),
        "new": name(CANARY, "Run") + b")\x81",
        "build": name("torch", "Tensor") + b")\x81" + b"}" + text("__class__") + canary + b"sb",
        "stack global": text("os") + text("system") + b"\x93" + text("touch ran") + b"\x85R",
        "instance": b"(" + text("touch ran") + b"ios\nsystem\n",
        "extension": b"\x82\x01",
        "huge bytearray": call(name("__builtin__", "bytearray"), whole(1 << 40)),
        "codec": call(name("_codecs", "encode"), text("\u1234" * 200_000), text("punycode")),
        "bytes": call(name("_codecs", "encode"), text("\xff"), text("latin1")),
        "rebuild": call(name("torch._tensor", "_rebuild_from_type_v2"), canary, canary, b")", b"}"),
        "subclass": call(name("torch._utils", "_rebuild_wrapper_subclass"), canary),
        "numpy": call(name("torch._utils", "_rebuild_device_tensor_from_numpy"), canary, canary, canary, canary),
        "deep lists": b"]" * 200_000 + b"a" * 199_999,
        "deep tuples": b")" + b"\x85" * 200_000,
        "deep marks": b"(" * 200_000,
        "itself": b"]q\x00h\x00a",
        "itself as a key": b"}q\x00h\x00h\x00s",
        "shared tuples": shared,
        "shared tuples as a key": b"}" + shared + b"Ns",
        "shared tuples in a set": call(name("__builtin__", "set"), b"]" + shared + b"a"),
        "long number": b"\x8b" + struct.pack("<i", 1 << 20) + b"\x01" * (1 << 20),
        "long text": b"X" + struct.pack("<I", 0xFFFFFFFF) + b"x",
        "memo": b"Nr\xff\xff\xff\xff",
        "deep tuples as a key": b"}" + b")" + b"\x85" * 200_000 + b"Ns",
        "tensor": tensor((2,), (1,)),
        "huge tensor": tensor((1 << 40,), (1,)),
        "repeated tensor": tensor((1 << 40,), (0,)),
        "negative tensor": tensor((-5,), (1,)),
        "negative offset": tensor((1,), (1,), offset=-100),
        "far offset": tensor((1,), (1,), offset=1 << 50),
        "huge storage": tensor((1,), (1,), of=storage(numel=1 << 45)),
        "negative storage": tensor((1,), (1,), of=storage(numel=-1)),
        "other storage": tensor((1,), (1,), of=storage(kind="DoubleStorage", numel=18)),
        "missing storage": tensor((1,), (1,), of=storage(key="../data.pkl")),
        "storage of another kind": b"(" + text("module") + canary + text("0") + text("cpu") + whole(1) + b"tQ",
        "other device": tensor((1,), (1,), of=storage(location="cuda:99")),
        "sparse": call(
            name("torch._utils", "_rebuild_sparse_tensor"),
            call(name("torch.serialization", "_get_layout"), text("torch.sparse_coo")),
            b"("
            + tensor((1, 1), (1, 1), of=storage(kind="LongStorage", numel=18))
            + tensor((1,), (1,))
            + b"("
            + whole(1 << 40)
            + b"t\x89t",
        ),
        "layout": call(name("torch.serialization", "_get_layout"), text("x")),
        "device": call(name("torch", "device"), text("x" * 100_000)),
        "size": call(name("torch", "Size"), b"]" + text("x") + b"a"),
        "parameter": call(name("torch._utils", "_rebuild_parameter"), text("x"), b"\x88", b"N"),
        "ordered dict with attributes": call(name("collections", "OrderedDict")) + b"}" + text("items") + canary + b"sb",
        "counter": call(name("collections", "Counter"), b"]" + b"N" * 0 + b"N" + b"a"),
        "empty": b"",
        "mark": b"(",
        "pop": b"0",
    }


def hostile_pickles(intact: bytes, rng: random.Random, count: int) -> Iterator[tuple[str, bytes]]:
    """Yield files in which the pickle is a hostile value, holds one in a good place, or is random."""
    (pickled,) = (data for part, data in parts_of(intact) if part.endswith("/data.pkl"))
    values = hostile_values()
    whole_dict = b"\x80\x02}(" + text("state_dict") + b"%s" + b"u."
    for what, value in values.items():
        yield what, with_pickle(intact, b"\x80\x02" + value + b".")
        yield (
            f"{what} in it",
            with_pickle(intact, whole_dict.replace(b"%s", b"}" + text("x") + b"%s" + b"s").replace(b"%s", value)),
        )
    operations = list(pickletools.opcodes)
    for number in range(count):
        data = bytearray(pickled)
        places = [position for _, _, position in pickletools.genops(pickled) if position is not None]
        kind = rng.choice(["operation", "insert", "cut", "random", "value", "swap"])
        at = rng.choice(places)
        if kind == "operation":
            data[at] = ord(rng.choice(operations).code)
        elif kind == "insert":
            data[at:at] = ord(rng.choice(operations).code).to_bytes()
        elif kind == "cut":
            end = rng.choice(places)
            del data[min(at, end) : max(at, end)]
        elif kind == "random":
            data = bytearray(b"\x80\x02" + b"".join(random_operation(rng) for _ in range(rng.randrange(1, 60))) + b".")
        elif kind == "value":
            data[at:at] = values[rng.choice(list(values))]
        else:
            data[at : at + 8] = data[rng.choice(places) :][:8]
        yield f"{number} {kind} {at}", with_pickle(intact, bytes(data))


def random_operation(rng: random.Random) -> bytes:
    simple = b"()]}0NaestuRbQ\x81\x85\x86\x87\x88\x89\x8f\x94"
    made = [
        bytes([rng.choice(simple)]),
        b"K" + rng.randbytes(1),
        b"h" + bytes([rng.randrange(4)]),
        b"q" + bytes([rng.randrange(4)]),
        text(rng.choice(["storage", "0", "cpu", "x"])),
        name("torch", rng.choice(["Tensor", "FloatStorage", "float32", "load", "device", "Size"])),
        name("collections", rng.choice(["OrderedDict", "Counter", "abc"])),
        name(CANARY, "run"),
    ]
    return rng.choice(made)
