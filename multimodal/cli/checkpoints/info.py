"""`multimodal info`: configuration, parameters, operations, memory, licence and training data of a model."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multimodal.cli import flags
from multimodal.cli.loading import loaded
from multimodal.cli.output import print_json, printable
from multimodal.cli.parser import Parser
from multimodal.errors import UsageError
from multimodal.system.assets import shipped
from multimodal.system.options import add_flags as add_option_flags
from multimodal.tasks.inspect.options import CostOptions

if TYPE_CHECKING:
    from multimodal.weights.folder import Checkpoint

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")

EXAMPLES = """examples:
  multimodal info clip-vit-16
  multimodal info gpt3_175b --training_tokens 300e9
  multimodal info my-model/ --format json --output facts.json
"""


def add_flags(p: Parser) -> None:
    p.epilog = EXAMPLES
    flags.model_argument(p, ", or a paper's size (see multimodal models)")
    add_option_flags(p, CostOptions)
    flags.results(p, "table", "json")


def run(options: Namespace) -> int:
    from multimodal.tasks.inspect.cost import counts
    from multimodal.tasks.inspect.cost_parts import READERS

    checkpoint = _of_preset(options.model) or loaded(options)
    given = CostOptions.among(vars(options))
    for name, kinds in READERS.items():
        if name in given and not any(isinstance(part, kinds) for part in checkpoint.model.modules()):
            raise UsageError(f"--{name}: does not apply to {checkpoint.source}")
    facts = describe(checkpoint)
    facts["counts"] = counts(checkpoint.model, **given)
    if options.format == "json":
        print_json(facts)
        return 0
    costs = facts.pop("counts")
    for key, value in facts.items():
        if isinstance(value, dict):
            print(f"{key}:")
            for line in _indented(value):
                print(f"  {line}")
        else:
            print(f"{key}: {_shown(value)}")
        if key == "parameters":
            for line in cost_lines(costs):
                print(line)
    return 0


def _of_preset(name: str) -> "Checkpoint | None":
    """A paper's size, whose weights are never made; None for what is a shipped model, a path or no such name."""
    from multimodal.models.presets import PRESETS, preset
    from multimodal.tasks.inspect.cost import of_config
    from multimodal.weights.folder import Checkpoint

    if name not in PRESETS or name in shipped() or Path(name).exists():
        return None
    card = {"licence": "none: a size, without weights", "training_data": "none"}
    return Checkpoint(of_config(preset(name)), source=f"{name} (preset)", card=card)


def describe(checkpoint: "Checkpoint") -> dict[str, Any]:
    """A checkpoint as facts for people."""
    from multimodal.system.records import to_record
    from multimodal.weights.folder import kind_of

    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    parts = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()}
    parts["not in a part"] = sum(p.numel() for p in model.parameters(recurse=False))
    return {
        "source": checkpoint.source,
        "kind": kind_of(model),
        "parameters": {"total": sum(p.numel() for p in model.parameters())} | {k: n for k, n in parts.items() if n},
        **_stored(checkpoint.source),
        "tokenizer": f"{type(tokenizer).__name__}, {tokenizer.vocab_size} ids" if tokenizer else "none",
        "preprocessing": checkpoint.preprocessing.to_dict() if checkpoint.preprocessing else "none",
        **({"licence": "not stated by the checkpoint", "training_data": "not stated"} | checkpoint.card),
        "config": to_record(model.config),
    }


def _stored(source: str) -> dict[str, Any]:
    """Number types and size of the weights' files; nothing for a preset."""
    from multimodal.weights.files.formats import find_weights
    from multimodal.weights.files.tensor_files import stored_bytes

    if not (path := Path(source)).exists():
        return {}
    sizes = stored_bytes(find_weights(path) if path.is_dir() else path)
    return {"stored": ", ".join(f"{kind} {_bytes(size)}" for kind, size in sizes.items())}


def cost_lines(costs: dict[str, Any]) -> list[str]:
    """Counts for people. Operations are of one item, memory of a batch."""
    own, batch, memory = costs["parameters"], costs["batch"], costs["training_bytes"]
    lines = [
        f"  without embeddings: {own['non_embedding']:,}",
        "forward pass (training: three times as many operations):",
    ]
    for name, part in costs["flops"].items():
        unit = part["unit"]
        share = part["in_attention"] / max(1, part["forward"])
        many = f"{part['amount']:g} {unit}{'s' if part['amount'] != 1 else ''}"
        each = f", {_flops(part[f'forward_a_{unit}'])} a {unit}" if part["amount"] != 1 else ""
        lines.append(f"  {name}: {_flops(part['forward'])} for {many}{each}; {share:.0%} between queries and keys")
    if cache := costs["cache_bytes"]:
        full, half = _bytes(cache["float32"]), _bytes(cache["bfloat16"])
        lines.append(f"cache of keys and values: {full} in float32, {half} in bfloat16 (batch {batch}, "
                     f"{cache['tokens']} tokens)")  # fmt: skip
    states = memory["optimizer"]
    lines += [
        f"memory to train (batch {batch}):",
        f"  weights {_bytes(memory['weights'])}, gradients {_bytes(memory['gradients'])}, "
        f"optimizer {_bytes(states['adamw'])} (AdamW) or {_bytes(states['muon'])} (Muon in the blocks)",
    ]
    for name, title in (("float32", "float32"), ("bfloat16", "bfloat16 autocast")):
        kept, whole = memory["activations"][name], memory["with_adamw"][name]
        lines.append(f"  {title}: activations {_bytes(kept)}, {_bytes(whole)} in all with AdamW")
    if compute := costs.get("compute"):
        best = compute["optimal"]
        lines.append(
            f"compute to train on {_count(compute['tokens'])} tokens, 6ND: {compute['flops']:.3g} FLOPs "
            f"({compute['petaflop_days']:.3g} petaflop/s-days); optimal for as many: {_count(best['parameters'])} "
            f"parameters on {_count(best['tokens'])} tokens"
        )
    return lines


def _scaled(number: int | float, units: Sequence[str], step: int = 1000) -> tuple[int | float, str]:
    """The number in the first unit in which it is below `step`, or in the last."""
    for unit in units[:-1]:
        if number < step:
            return number, unit
        number /= step
    return number, units[-1]


def _count(number: int | float) -> str:
    value, unit = _scaled(number, ("", "k", "M", "B", "T"))
    return f"{value:.3g} {unit}".rstrip()


def _bytes(number: int | float) -> str:
    value, unit = _scaled(number, UNITS, 1024)
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _flops(number: int | float) -> str:
    value, unit = _scaled(number, ("", "k", "M", "G", "T", "P"))
    return f"{value:.3g} {unit}FLOP"


def _indented(value: dict[str, Any]) -> list[str]:
    """Nested facts, a line each."""
    lines = []
    for key, item in value.items():
        if isinstance(item, dict):
            lines += [f"{key}:", *(f"  {line}" for line in _indented(item))]
        elif item is not None:  # what is off or left to its default would be half of the lines
            lines.append(f"{key}: {_shown(item)}")
    return lines


def _shown(item: Any) -> str:
    if isinstance(item, list | tuple):
        return ", ".join(map(_shown, item))
    return f"{item:,}" if type(item) is int else printable(str(item))
