"""State dicts of TorchScript archives, named by the path of attributes. The code in the archive is searched as text for
declarations; it is never compiled."""

import re
from typing import NamedTuple

from torch import Tensor

from multimodal.weights.files.pickled import Instance, Name

MOST_ATTRIBUTES, MOST_NAME = 500_000, 500  # small files can hold one module in many places


class Declared(NamedTuple):
    """Module class. `tensors`: its parameters and buffers; None in archives older than that list."""

    tensors: frozenset[str] | None
    own_state: bool  # restored by its own methods


def read_classes(code: dict[str, str]) -> dict[Name, Declared]:
    """Module classes in the files below `code/`."""
    classes = {}
    for file, text in code.items():
        module = file.removeprefix("code/").removesuffix(".py").replace("/", ".")
        for part in re.split(r"^class ", text, flags=re.MULTILINE)[1:]:
            if head := re.match(r"(\w+)\(Module\):", part):
                classes[Name(module, head[1])] = _declared(part)
    return classes


def _declared(text: str) -> Declared:
    lists = {kind: re.search(rf"^  __{kind}__ = \[(.*)\]$", text, re.MULTILINE) for kind in ("parameters", "buffers")}
    names = [name for line in lists.values() if line for name in re.findall(r'"([^"]*)"', line[1])]
    own_state = re.search(r"^  def __setstate__\(", text, re.MULTILINE) is not None
    return Declared(frozenset(names) if lists["buffers"] else None, own_state)


def state_dict(root: Instance, classes: dict[Name, Declared]) -> dict[str, Tensor]:
    """Parameters and buffers of a module and its submodules. Raises ValueError for a module whose state only its own
    code can restore."""
    if root.kind not in classes:
        raise ValueError(f"{root.kind} is not a TorchScript module")
    tensors: dict[str, Tensor] = {}
    left: list[tuple[str, Instance, tuple[int, ...]]] = [("", root, ())]
    count = 0
    while left:
        path, module, above = left.pop()
        declared = classes[module.kind]
        if declared.own_state:
            raise ValueError(
                f"module {path or 'at the top'} restores its state with code ({module.kind}), which is never run"
            )
        if not isinstance(module.state, dict) or id(module) in above:
            raise ValueError(f"module {path or 'at the top'} has no state, or contains itself")
        if (count := count + 1 + len(module.state)) > MOST_ATTRIBUTES:
            raise ValueError(f"modules of more than {MOST_ATTRIBUTES} attributes")
        around = (*above, id(module))
        for name, value in module.state.items():
            full = f"{path}.{name}" if path else str(name)
            if len(full) > MOST_NAME:
                raise ValueError(f"an attribute with a name of {len(full)} characters, more than {MOST_NAME}")
            if isinstance(value, Tensor) and (declared.tensors is None or name in declared.tensors):
                tensors[full] = value
            elif isinstance(value, Instance) and value.kind in classes:
                left.append((full, value, around))
    return tensors
