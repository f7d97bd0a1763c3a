"""State dicts of TorchScript archives, named by the path of attributes. The code in the archive is searched as text for
what each class declares; it is never compiled."""

import re
from typing import NamedTuple

from torch import Tensor

from multimodal.weights.pickled import Instance, Name

MOST_MODULES = 100_000


class Declared(NamedTuple):
    """A module class. `tensors`: its parameters and buffers; None where the archive is older than that list."""

    tensors: frozenset[str] | None
    own_state: bool  # kept and restored by methods of its own


def read_classes(code: dict[str, str]) -> dict[Name, Declared]:
    """The classes of modules, from the files below `code/`."""
    found = {}
    for file, text in code.items():
        module = file.removeprefix("code/").removesuffix(".py").replace("/", ".")
        for part in re.split(r"^class ", text, flags=re.MULTILINE)[1:]:
            if head := re.match(r"(\w+)\(Module\):", part):
                found[Name(module, head[1])] = _declared(part)
    return found


def _declared(text: str) -> Declared:
    lists = {kind: re.search(rf"^  __{kind}__ = \[(.*)\]$", text, re.MULTILINE) for kind in ("parameters", "buffers")}
    names = [name for found in lists.values() if found for name in re.findall(r'"([^"]*)"', found[1])]
    own_state = re.search(r"^  def __setstate__\(", text, re.MULTILINE) is not None
    return Declared(frozenset(names) if lists["buffers"] else None, own_state)


def state_dict(root: Instance, classes: dict[Name, Declared]) -> dict[str, Tensor]:
    """Parameters and buffers of a module and those in it. Raises ValueError for a module whose state only its own code
    can restore."""
    if root.kind not in classes:
        raise ValueError(f"{root.kind} is no module of TorchScript")
    found: dict[str, Tensor] = {}
    left: list[tuple[str, Instance, tuple[int, ...]]] = [("", root, ())]
    for _ in range(MOST_MODULES):
        if not left:
            return found
        path, module, above = left.pop()
        declared = classes[module.kind]
        if declared.own_state:
            raise ValueError(
                f"module {path or 'at the top'} restores its state with code ({module.kind}), which is not run"
            )
        if not isinstance(module.state, dict) or id(module) in above:
            raise ValueError(f"module {path or 'at the top'} has no state, or holds itself")
        for name, value in module.state.items():
            full = f"{path}.{name}" if path else str(name)
            if isinstance(value, Tensor) and (declared.tensors is None or name in declared.tensors):
                found[full] = value
            elif isinstance(value, Instance) and value.kind in classes:
                left.append((full, value, (*above, id(module))))
    raise ValueError(f"more than {MOST_MODULES} modules")
