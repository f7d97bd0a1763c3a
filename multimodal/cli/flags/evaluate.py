"""The flags of `multimodal evaluate`."""

import argparse
from collections.abc import Callable
from functools import partial

from multimodal.cli import machine
from multimodal.cli.flags import caption, evaluate_images, transcribe
from multimodal.cli.flags.transcribe import count


def add(commands: argparse._SubParsersAction, model: Callable, picture_model: Callable) -> None:
    """`model(parser, default)` adds the flags that name a model, `picture_model` one of pictures."""
    p = commands.add_parser("evaluate", help="measure a model on data with known answers")
    kinds = p.add_subparsers(dest="kind", required=True, metavar="KIND")
    _asr(kinds, model)
    evaluate_images.add(kinds, picture_model)
    _captions(kinds, model)


def _asr(kinds: argparse._SubParsersAction, model: Callable) -> None:
    asr = kinds.add_parser(
        "asr", help="word and character error rates of transcripts", usage="%(prog)s MANIFEST [flags]",
        formatter_class=transcribe.Help,
    )  # fmt: skip
    asr.add_argument("manifest", metavar="MANIFEST", help="recordings and their texts: .jsonl, .csv, .tsv or tars")
    model(asr, "asr-conformer-en")
    asr.add_argument("--report", metavar="FILE", help="errors by type and the worst utterances: .md or .html")
    machine.overwrite(asr)
    asr.add_argument("--normalizer", choices=["english", "basic", "none"], help="Whisper's, of both texts (default: "
                     "english for English, else basic)")  # fmt: skip
    asr.add_argument("--keep_marks", action="store_true", help="keep combining marks, which Brahmic scripts need")
    asr.add_argument("--limit", type=count, metavar="N", help="only the first N utterances")
    asr.add_argument("--output", choices=["table", "json"], default="table", help="on stdout (default: table)")
    machine.lists(asr)
    flags = transcribe
    for group in (flags.speed, flags.decoding, flags.checks, flags.voice, flags.language):
        group(asr.add_argument_group(f"transcription: {group.__name__}"))


def _captions(kinds: argparse._SubParsersAction, model: Callable) -> None:
    p = kinds.add_parser(
        "captions", help="BLEU, ROUGE-L, CIDEr-D and CLIPScore of captions", formatter_class=transcribe.Help,
        usage="%(prog)s DATA [DATA ...] (--model MODEL | --predictions FILE) [flags]",
    )  # fmt: skip
    p.add_argument("data", nargs="+", metavar="DATA", help="pictures with what people wrote of them: .jsonl, .csv, "
                   ".tsv (lines of one file are one picture) or WebDataset tars")  # fmt: skip
    p.add_argument("--limit", type=count, metavar="N", help="only N pictures, evenly spread over DATA")
    machine.lists(p)
    g = p.add_argument_group("captions")
    model(g, "")  # "": not given
    g.add_argument("--predictions", metavar="FILE", help="score these instead: .csv or .jsonl with columns file and "
                   "caption, as multimodal caption --output writes them")  # fmt: skip
    caption.decoding(p.add_argument_group("how the model searches (defaults: as its card has them, else as said)"))
    g = p.add_argument_group("scores")
    g.add_argument("--clip_model", metavar="MODEL", help="also CLIPScore and RefCLIPScore, by this CLIP, such as "
                   "clip-vit-16")  # fmt: skip
    g.add_argument("--agreement", action="store_true", help="also what people's captions score against each other")
    g.add_argument("--report", metavar="FILE", help="with the worst and the best captions: .md or .html")
    machine.overwrite(g)
    g.add_argument("--output", choices=["table", "json"], default="table", help="on stdout (default: table)")
    g = p.add_argument_group("machine")
    machine.add(g, 16)
    p.set_defaults(check=partial(_one_of_both, p))


def _one_of_both(p: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if bool(options.model) == bool(options.predictions):
        p.error("captions come from either --model or --predictions")
