"""What `multimodal caption` does with its flags (`cli_caption.py`)."""

import os
import warnings
from argparse import Namespace
from collections.abc import Iterator, Set
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from multimodal.cli.images import Add, Bar, Printed, append_to, found, results_place, say
from multimodal.cli.output import fail, printable
from multimodal.cli.shared import output_folder, outputs_of
from multimodal.errors import ImageError, UsageError
from multimodal.system.outputs import Outputs, write_output
from multimodal.tasks.caption.caption import CaptionWriter, prepared, written
from multimodal.tasks.caption.options import CaptionOptions
from multimodal.tasks.encode.features import model_digest
from multimodal.weights.load import load

COLUMNS = ["file", "caption", "score", "logprob", "tokens", "finished"]
OPTIONS = CaptionOptions.__dataclass_fields__


def caption(options: Namespace) -> int:
    if options.threads:
        torch.set_num_threads(options.threads)
    files, code = found(options.images)
    if not files:
        return code
    outputs = outputs_of(options, files, but=("images",))
    if options.format != "txt-per-image":
        results_place(options, outputs)
    checkpoint = load(options.model, options.architecture, options.preprocessing)
    chosen = {name: value for name, value in vars(options).items() if name in OPTIONS}
    appended = options.output is not None and options.format != "txt-per-image"
    digest = model_digest(checkpoint) if appended else ""
    write = CaptionWriter(*prepared(checkpoint, options.compute_type, options.device, chosen))
    del checkpoint  # its memory is of no more use
    if "seed" in chosen and not write.options.temperature:
        warnings.warn("--seed: has no effect without drawing (--temperature, --top_p, --top_k)", stacklevel=1)
    regions = None
    if options.regions is not None:
        from multimodal.tasks.caption.regions import Regions

        places, clashes = places_of(files, options.images, options.regions, ".regions.png", outputs)
        for folder in {place.parent for place in places.values()}:
            output_folder(folder, "--regions")
        regions, files, code = Regions(write, places), list(places), code or clashes
    run = _Run(options, write, regions)
    if options.format == "txt-per-image":
        return _texts(options, run, files, outputs) or code
    if options.output is None:
        printed = Printed(options.format, _columns(write.options.num_captions > 1), _rows, _table)
        failed = run(files, printed.add)
        printed.end()
        return failed or code
    return _appended(options, run, files, digest) or code


class _Run:
    """Captions of pictures, as soon as they are known. A picture that cannot be read is one line."""

    def __init__(self, options: Namespace, write: CaptionWriter, regions: Any):
        self.options, self.write, self.regions = options, write, regions

    def drawn(self, file: str) -> bool:
        """Whether its words' regions are there, if they are wanted."""
        return self.regions is None or self.regions.places[file].exists()

    def __call__(self, files: list[str], add: Add, there: Set[str] = frozenset()) -> int:
        """Pictures that are `there` go along with their batch, and no more."""
        code, cut = 0, 0
        with Bar(len(files), self.options.output is not None) as bar:
            for file, one in written(files, self.write, self.options.batch_size, self.options.workers):
                bar.step()
                if isinstance(one, ImageError):
                    code = bar.failed(one)
                    continue
                if file in there:
                    continue
                record = _shown(self.write.record(file, one.captions))
                if self.regions is not None and bar.attempt(file, partial(self.regions.draw, file, one)):
                    code = 1
                    continue
                add(record)
                cut += not record["finished"]
        if cut:
            say(f"captions cut at {self.write.limit} tokens, which are flagged as not finished: {cut}")
        return code


def _appended(options: Namespace, run: _Run, files: list[str], digest: str) -> int:
    """To a file that a second call goes on with."""
    settings = {
        "command": "caption", "model": digest, "preprocessing": run.write.checkpoint.preprocessing.to_dict(),
        **asdict(run.write.options), **({} if run.write.options.temperature else {"seed": 0}),  # only draws see it
        "compute_type": options.compute_type, "device": str(run.write.device),
    }  # fmt: skip
    columns = _columns(run.write.options.num_captions > 1)
    return append_to(options, columns, settings, files, _rows, run, run.drawn)


def _texts(options: Namespace, run: _Run, files: list[str], outputs: Outputs) -> int:
    """A text file an image, whole or not at all. One that is there stays, whoever wrote it, without `--overwrite`."""
    places, code = places_of(files, options.images, options.output, ".txt", outputs)
    there = {file for file, place in places.items() if place.exists() and run.drawn(file) and not options.overwrite}
    if there:
        say(f"{len(there)} of {len(files)} pictures have their .txt already (--overwrite rewrites them)")
    for folder in {place.parent for file, place in places.items() if file not in there}:
        output_folder(folder, "--output")

    def put(record: dict[str, Any]) -> None:
        lines = [" ".join(one["caption"].split()) for one in record.get("captions", [record])]
        write_output(places[record["file"]], ("\n".join(lines) + "\n").encode())

    return run([file for file in places if file not in there], put) or code


def places_of(
    files: list[str], arguments: list[str], folder: str | None, ending: str, outputs: Outputs
) -> tuple[dict[str, Path], int]:
    """Where what belongs to each picture is written: NAME and `ending` beside it, or in `folder`, where the folders
    inside an argument are made again. Of pictures that would share a place the first has it, and the others are
    reported, as is one whose place is an input."""
    places: dict[str, Path] = {}
    owners: dict[Path, str] = {}
    code = 0
    roots = [argument for argument in arguments if os.path.isdir(argument)]
    for file in files:
        name = Path(file).with_suffix(ending)
        if folder is not None:
            root = next((one for one in roots if Path(file).is_relative_to(one)), None)
            name = Path(folder, name.name if root is None else name.relative_to(root))
        if owners.setdefault(name, file) != file:
            code = fail(f"{file}: would be written to {name}, as {owners[name]}")
            continue
        try:
            outputs.spare(name)
            places[file] = name
        except UsageError as error:
            code = fail(error)
    return places, code


def _shown(record: dict[str, Any]) -> dict[str, Any]:
    """Six digits, which is what float32 has."""
    rounded = {name: float(f"{record[name]:.6g}") for name in ("score", "logprob")}
    inner = {"captions": [_shown(one) for one in record["captions"]]} if "captions" in record else {}
    return {**record, **rounded, **inner}


def _columns(several: bool) -> list[str]:
    return [*COLUMNS, "count"] if several else COLUMNS


def _rows(record: dict[str, Any]) -> Iterator[list]:
    for one in record.get("captions", [record]):
        yield [record["file"], *(one[name] for name in _columns("captions" in record)[1:])]


def _table(record: dict[str, Any]) -> Iterator[str]:
    for one in record.get("captions", [record]):
        times = f"  ({one['count']} times)" if one.get("count", 1) > 1 else ""
        yield f"{one['score']:8.4f}  {printable(one['caption'])}{'' if one['finished'] else ' …'}{times}"
