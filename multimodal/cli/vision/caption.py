"""`multimodal caption`: describe images with a captioner checkpoint."""

import argparse
import os
import warnings
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multimodal.cli import flags
from multimodal.cli.console import console
from multimodal.cli.files import output_folder, outputs_of
from multimodal.cli.loading import loaded
from multimodal.cli.output import fail, printable, six_digits
from multimodal.cli.parser import Parser
from multimodal.cli.vision.images import (
    APPENDED,
    NOTHING,
    Add,
    ImageOutput,
    ImageProgress,
    There,
    append_to,
    attempt,
    found,
    no_videos,
    results_place,
)
from multimodal.errors import UsageError
from multimodal.system.options import add_flags as add_option_flags
from multimodal.system.outputs import Outputs, is_ours, write_output
from multimodal.system.signals import at_stop
from multimodal.tasks.caption.options import CaptionBatchOptions, CaptionOptions
from multimodal.tokens.video.options import ClipOptions

if TYPE_CHECKING:
    from multimodal.tasks.caption.caption import CaptionWriter

EXAMPLES = """examples:
  multimodal caption photo.jpg --beam_size 4
  multimodal caption photos/ -o photos.csv                # rerun to resume after a stop
  multimodal caption photos/ --format txt-per-image       # photos/a.txt beside photos/a.jpg
  multimodal caption clip.mp4 --max_frames 4              # or --per_clip for one caption
  multimodal caption photo.jpg --model blip-base --top_p 0.9 --num_captions 5 --seed 1
"""
STYLES = ("table", "csv", "jsonl", "json", "txt-per-image")
COLUMNS = ["file", "caption", "score", "logprob", "tokens", "finished"]


def add_flags(p: Parser) -> None:
    p.usage, p.epilog = "%(prog)s IMAGE [IMAGE ...] [flags]", EXAMPLES
    p.add_argument("images", nargs="+", metavar="IMAGE", help="files, folders or globs; of a video, each "
                   "sampled frame is an image")  # fmt: skip
    _output(p.add_argument_group("results"))
    g = p.add_argument_group("captions (the model's card may set other defaults)")
    add_option_flags(g, CaptionOptions)
    flags.videos(p)
    flags.model_and_machine(p, "caption", CaptionBatchOptions)


def _output(g: argparse._ArgumentGroup) -> None:
    g.add_argument("--format", choices=STYLES, help="default: table, or by the ending of --output (.csv, .jsonl); "
                   "txt-per-image: NAME.txt with one caption per line, beside the image or in the folder "
                   "--output")  # fmt: skip
    g.add_argument("--output", "-o", metavar="FILE|FOLDER", help="append the captions of each image to a .csv or "
                   ".jsonl file; rerun to resume: finished images are skipped. FILE.settings.json records the "
                   "settings")  # fmt: skip
    g.add_argument("--overwrite", action="store_true", help="overwrite --output and existing texts")
    g.add_argument("--regions", metavar="DIR", help="also draw NAME.regions.png: where the model looked for each "
                   "word of the caption")  # fmt: skip


def check(p: Parser, options: Namespace) -> None:
    """Refuse contradictory flags."""
    options.format = options.format or flags.by_ending(options.output, APPENDED, "table")
    if options.output is not None and options.format not in (*APPENDED, "txt-per-image"):
        p.error(f"--output {options.output}: results are appended to csv or jsonl, or written as txt-per-image "
                f"(--format {options.format or 'csv'})")  # fmt: skip
    flags.check_ending(p, options)
    if options.overwrite and options.output is None and options.format != "txt-per-image":
        p.error("--overwrite: names no file (--output)")


def run(options: Namespace) -> int:
    files, code = found(options.images, options)
    if not files:  # before torch is imported
        return code
    from multimodal.tasks.caption.caption import CaptionWriter, prepared
    from multimodal.tasks.encode.features import model_digest

    if options.regions is not None:
        no_videos(files, "--regions")
    if options.format == "txt-per-image" and not getattr(options, "per_clip", False):
        no_videos(files, "--format txt-per-image without --per_clip")
    outputs = outputs_of(options, files, but=("images",))
    if options.format != "txt-per-image":
        results_place(options, outputs)
    checkpoint = loaded(options, "caption")
    chosen = CaptionOptions.among(vars(options))
    appended = options.output is not None and options.format != "txt-per-image"
    digest = model_digest(checkpoint) if appended else ""
    write = CaptionWriter(*prepared(checkpoint, options.compute_type, options.device, chosen))
    del checkpoint  # frees its memory
    if "seed" in chosen and not write.options.temperature:
        warnings.warn("--seed: has no effect without drawing (--temperature, --top_p, --top_k)", stacklevel=1)
    regions = None
    if options.regions is not None:
        from multimodal.tasks.caption.regions import RegionPlots

        places, clashes = places_of(files, options.images, options.regions, ".regions.png", outputs)
        for folder in {place.parent for place in places.values()}:
            output_folder(folder, "--regions")
        regions, files, code = RegionPlots(write, places), list(places), code or clashes
    work = _CaptionRun(options, write, regions)
    if options.format == "txt-per-image":
        return _texts(options, work, files, outputs) or code
    if options.output is None:
        printed = ImageOutput(options.format, _columns(write.options.num_captions > 1), _rows, _table)
        failed = work(files, printed.add)
        printed.end()
        return failed or code
    return _appended(options, work, files, digest) or code


class _CaptionRun:
    """Captions of images, as soon as they are known. An image that cannot be read is one line."""

    def __init__(self, options: Namespace, write: "CaptionWriter", regions: Any):
        self.options, self.write, self.regions = options, write, regions

    def drawn(self, file: str) -> bool:
        """Return True if its word regions exist or are not requested."""
        return self.regions is None or self.regions.paths[file].exists()

    def __call__(self, files: list[str], add: Add, there: There = NOTHING) -> int:
        """Images that are `there` go along with their batch, and no more."""
        from multimodal.tasks.encode.loaded import Items
        from multimodal.tasks.encode.reader import ImageReader

        code, cut, options, preprocessing = 0, 0, self.options, self.write.checkpoint.preprocessing
        video = ClipOptions(**ClipOptions.among(vars(options)))
        reader = ImageReader(preprocessing, options.batch_size, options.workers, False, video, done=there)
        progress = ImageProgress(len(files), options.output is not None)
        for file, one in reader.results(Items(files, keyed=False), self.write.generated, self.write.best_of):
            progress.step(file)
            if isinstance(one, Exception):
                code = fail(one)
                continue
            if file in there:
                continue
            record = _shown(self.write.record(file, one.captions, one.time))
            if self.regions is not None and attempt(file, partial(self.regions.draw, file, one)):
                code = 1
                continue
            add(record)
            cut += not record["finished"]
        if cut:
            console.note(f"captions cut at {self.write.limit} tokens, which are flagged as not finished: {cut}")
        return code


def _appended(options: Namespace, run: _CaptionRun, files: list[str], digest: str) -> int:
    """To a file that a second call goes on with."""
    settings = {
        "command": "caption", "model": digest, "preprocessing": run.write.checkpoint.preprocessing.to_dict(),
        **vars(run.write.options), **({} if run.write.options.temperature else {"seed": 0}),  # only draws see it
        "compute_type": options.compute_type, "device": str(run.write.device),
        **ClipOptions.among(vars(options)),
    }  # fmt: skip
    columns = _columns(run.write.options.num_captions > 1)
    return append_to(options, columns, settings, files, _rows, run, run.drawn)


def _texts(options: Namespace, run: _CaptionRun, files: list[str], outputs: Outputs) -> int:
    """A text file an image, whole or not at all. One that is there stays, whoever wrote it, without `--overwrite`."""
    places, code = places_of(files, options.images, options.output, ".txt", outputs)
    there = {file for file, place in places.items() if place.exists() and run.drawn(file) and not options.overwrite}
    if there:
        foreign = sorted(str(places[file]) for file in there if not is_ours(places[file]))
        other = f"; {len(foreign)} not as multimodal wrote it, such as {foreign[0]}" if foreign else ""
        console.note(f"{len(there)} of {len(files)} images have their .txt already (--overwrite rewrites them){other}")
    for folder in {place.parent for file, place in places.items() if file not in there}:
        output_folder(folder, "--output")

    done = 0

    def put(record: dict[str, Any]) -> None:
        nonlocal done
        lines = [" ".join(one["caption"].split()) for one in record.get("captions", [record])]
        write_output(places[record["file"]], ("\n".join(lines) + "\n").encode())
        done += 1

    with at_stop(lambda: f"multimodal: stopped; {done} texts are written; the same command resumes"):
        code = run([file for file in places if file not in there], put) or code
    where = f"to {options.output}" if options.output else "beside the images"
    console.note(f"{done} text{'s' * (done != 1)} written {where}")
    return code


def places_of(
    files: list[str], arguments: list[str], folder: str | None, ending: str, outputs: Outputs
) -> tuple[dict[str, Path], int]:
    """Output path of each image: NAME and `ending` beside it, or in `folder`, where the folders
    inside an argument are made again. Of images that would share a place the first has it, and the others are
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
    rounded = {name: six_digits(record[name]) for name in ("score", "logprob")}
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
