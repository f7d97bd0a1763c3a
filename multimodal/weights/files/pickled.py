"""Pickle streams, read as data: opcodes make numbers, texts, lists, tuples, dicts and tensors, and nothing else.

Python's unpickler calls what the stream names. Here a name stays a `Name`; the few that PyTorch writes around a tensor
map to functions of this module, and all others are refused."""

import io
import pickletools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST_BYTES = 1 << 26
MOST_OPCODES = 2_000_000  # about 30 per tensor; takes seconds
MOST_DIMENSIONS = 64
MOST_KEY = 1 << 60  # of a dict, above any address: greater ones can be chosen to have one hash, and take hours
CODE = "__torch__."  # module of TorchScript classes
DTYPES = {
    "FloatStorage": torch.float32, "HalfStorage": torch.float16, "BFloat16Storage": torch.bfloat16,
    "DoubleStorage": torch.float64, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128,
}  # fmt: skip
Read = Callable[[str, torch.dtype, int], torch.UntypedStorage]


class Name(NamedTuple):
    """Class or function named by the stream; never looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Storage(NamedTuple):
    data: torch.UntypedStorage
    dtype: torch.dtype
    count: int


class Instance:
    """Object of a TorchScript class: its name and state."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: Name):
        self.kind, self.state = kind, None


def read_pickle(stream: io.BytesIO, read: Read) -> Any:
    """Object of the next pickle in `stream`. `read(key, dtype, count)` returns a storage. Raises ValueError with a
    message for refused content; ValueError, TypeError, IndexError or KeyError for damage."""
    machine = _Machine(read)
    for number, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
        if number > MOST_OPCODES:
            raise ValueError(f"more than {MOST_OPCODES} pickle opcodes")
        machine.step(opcode.name, argument)
    return machine.pop()


class _Mark:
    pass


class _Machine:
    """Stack and memo of one pickle."""

    def __init__(self, read: Read):
        self.read, self.stack, self.memo, self.copied = read, [], {}, 0

    def step(self, opcode: str, argument: Any) -> None:
        if opcode in CONSTANTS:
            self.stack.append(argument)
        elif opcode in VALUES:
            self.stack.append(VALUES[opcode]())
        elif opcode in STEPS:
            STEPS[opcode](self, argument)
        elif opcode not in ("PROTO", "FRAME", "STOP"):
            raise ValueError(f"holds {opcode.lower()}; {ONLY}")

    def pop(self) -> Any:
        if (value := self.stack.pop()) is _Mark:
            raise ValueError("a damaged pickle")
        return value

    def top(self, kind: type) -> Any:
        if not isinstance(self.stack[-1], kind):
            raise ValueError(f"a damaged pickle (a {type(self.stack[-1]).__name__}, not a {kind.__name__})")
        return self.stack[-1]

    def marked(self) -> list[Any]:
        """Pop the values down to the last mark."""
        at = len(self.stack) - 1
        while self.stack[at] is not _Mark:
            at -= 1
            if at < 0:
                raise ValueError("a damaged pickle")
        values = self.stack[at + 1 :]
        del self.stack[at:]
        return values

    def last(self, count: int) -> list[Any]:
        return [self.pop() for _ in range(count)][::-1]

    def put(self, at: int | None) -> None:
        self.memo[len(self.memo) if at is None else at] = self.top(object)

    def extend(self, values: list[Any]) -> None:
        self.top(list).extend(values)

    def update(self, values: list[Any]) -> None:
        self.top(dict).update(_pairs(values))

    def named(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise ValueError("a damaged pickle")
        full = Name(module, name)
        storage = module == "torch" and name in DTYPES
        if not (storage or full in MAKERS or module == "__torch__" or module.startswith(CODE)):
            raise ValueError(f"names {str(full)[:80]}; {ONLY}")
        self.stack.append(full)

    def reduce(self) -> None:
        function, arguments = self.last(2)
        if not isinstance(function, Name) or function not in MAKERS or not isinstance(arguments, tuple):
            raise ValueError(f"calls {str(function)[:80] if isinstance(function, Name) else 'no function'}; {ONLY}")
        self.copied += sum(len(one) for one in arguments if isinstance(one, list))
        if self.copied > MOST_OPCODES:  # of one list, again and again
            raise ValueError(f"copies more than {MOST_OPCODES} items")
        self.stack.append(MAKERS[function](*arguments))

    def new(self) -> None:
        kind, arguments = self.last(2)
        if not isinstance(kind, Name) or arguments != ():
            raise ValueError(f"makes an object; {ONLY}")
        self.stack.append(MAKERS[kind]() if kind in MAKERS else Instance(kind))

    def build(self) -> None:
        state = self.pop()
        if isinstance(self.stack[-1], Instance):
            self.stack[-1].state = state
        elif not isinstance(self.stack[-1], dict):  # an OrderedDict's state: versions of modules, unused
            raise ValueError(f"sets the state of a {type(self.stack[-1]).__name__}; {ONLY}")

    def storage(self) -> None:
        """A persistent id: ("storage", class, key, device, count), and in the old layout a view of it."""
        value = self.pop()
        if isinstance(value, tuple) and len(value) == 6 and value[5] is None:
            value = value[:5]
        match value:
            case ("storage", Name("torch", name), str(key), str(), int(count)) if name in DTYPES and count >= 0:
                self.stack.append(Storage(self.read(key, DTYPES[name], count), DTYPES[name], count))
            case _:
                raise ValueError("a storage of an unknown kind")


def _pairs(values: list[Any]) -> list[tuple[Any, Any]]:
    """Keys and values. Keys must be texts or numbers: hashing deep tuples would overflow the C stack."""
    if len(values) % 2 or not all(isinstance(key, str | int | float | None) for key in values[::2]):
        raise ValueError("a dict key that is neither a text nor a number")
    if any(isinstance(key, int) and abs(key) >= MOST_KEY for key in values[::2]):
        raise ValueError(f"a dict key of {MOST_KEY} or more")
    return list(zip(values[::2], values[1::2], strict=True))


def _exactly(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"expected a {kind.__name__} (got a {type(value).__name__})")
    return value


def _ordered(*items: Any) -> dict[Any, Any]:
    """OrderedDict; Python 2 wrote its items as a list of pairs."""
    return dict(_pairs([part for key, value in _exactly(list, *items or [[]]) for part in (key, value)]))


def _tensor(storage: Any, offset: Any, size: Any, stride: Any) -> Tensor:
    """View of a storage, checked against its bounds."""
    if not (isinstance(storage, Storage) and isinstance(size, tuple) and isinstance(stride, tuple)):
        raise ValueError("a tensor without a storage, a size or a stride")
    if len(size) != len(stride) or len(size) > MOST_DIMENSIONS:
        raise ValueError(f"a tensor of {len(size)} dimensions with {len(stride)} strides")
    numbers = [offset, *size, *stride]
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
        raise ValueError("a tensor whose offset, size or stride is not a count")
    count = 1
    for length in size:
        count *= length
    end = offset + (1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if count else 0)
    if end > storage.count or count > storage.count:  # the latter: expanded, so a copy would grow
        raise ValueError(f"a tensor of shape {list(size)[:8]} that reaches outside its storage ({storage.count})")
    return torch.empty(0, dtype=storage.dtype).set_(storage.data, offset, size, stride)


def _tensor_v2(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any = False, hooks: Any = None, bits: Any = None
) -> Tensor:  # fmt: skip
    """`grad` and `hooks` are unused."""
    if bits:
        raise ValueError("a tensor with a conjugate or negative bit")
    return _tensor(storage, offset, size, stride)


ONLY = "only dense tensors, numbers, texts, lists and dicts are read"
# opcodes whose argument is the value
CONSTANTS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING"),
    *("SHORT_BINSTRING", "UNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINUNICODE", "BINBYTES", "BINBYTES8"),
    "SHORT_BINBYTES",
}
VALUES: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False, "EMPTY_LIST": list,
    "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple, "MARK": lambda: _Mark,
}  # fmt: skip
STEPS: dict[str, Callable[[_Machine, Any], Any]] = {
    "POP": lambda m, _: m.stack.pop(), "POP_MARK": lambda m, _: m.marked(),
    "DUP": lambda m, _: m.stack.append(m.top(object)),
    "APPEND": lambda m, _: m.extend([m.pop()]), "APPENDS": lambda m, _: m.extend(m.marked()),
    "SETITEM": lambda m, _: m.update(m.last(2)), "SETITEMS": lambda m, _: m.update(m.marked()),
    "LIST": lambda m, _: m.stack.append(m.marked()), "TUPLE": lambda m, _: m.stack.append(tuple(m.marked())),
    "DICT": lambda m, _: m.stack.append(dict(_pairs(m.marked()))),
    "TUPLE1": lambda m, _: m.stack.append(tuple(m.last(1))), "TUPLE2": lambda m, _: m.stack.append(tuple(m.last(2))),
    "TUPLE3": lambda m, _: m.stack.append(tuple(m.last(3))),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda m, at: m.stack.append(m.memo[at])),
    "GLOBAL": lambda m, text: m.named(*text.split(" ", 1)), "STACK_GLOBAL": lambda m, _: m.named(*m.last(2)),
    "REDUCE": lambda m, _: m.reduce(), "NEWOBJ": lambda m, _: m.new(), "BUILD": lambda m, _: m.build(),
    "BINPERSID": lambda m, _: m.storage(),
}  # fmt: skip
MAKERS: dict[Name, Callable[..., Any]] = {
    Name("collections", "OrderedDict"): _ordered,
    Name("torch._utils", "_rebuild_tensor"): _tensor,
    Name("torch._utils", "_rebuild_tensor_v2"): _tensor_v2,
    Name("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
    Name("torch", "Size"): lambda sizes: _exactly(tuple, sizes),  # a list would be copied
    Name("torch", "device"): lambda *_: None,
    Name("torch.jit._pickle", "restore_type_tag"): lambda value, _: value,
    **{Name("torch.jit._pickle", f"build_{kind}list"): lambda value: value
       for kind in ("int", "double", "bool", "tensor")},
}  # fmt: skip
