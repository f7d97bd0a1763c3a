"""The flags of `multimodal evaluate`."""

import argparse
from collections.abc import Callable

from multimodal import cli_transcribe
from multimodal.cli_transcribe import count


def add(commands: argparse._SubParsersAction, model: Callable) -> None:
    """`model(parser, default)` adds the flags that name a model."""
    p = commands.add_parser("evaluate", help="measure a model on data with known answers")
    kinds = p.add_subparsers(dest="kind", required=True, metavar="KIND")
    _asr(kinds, model)


def _asr(kinds: argparse._SubParsersAction, model: Callable) -> None:
    asr = kinds.add_parser(
        "asr", help="word and character error rates of transcripts", usage="%(prog)s MANIFEST [flags]",
        formatter_class=cli_transcribe.Help,
    )  # fmt: skip
    asr.add_argument("manifest", metavar="MANIFEST", help="recordings and their texts: .jsonl, .csv, .tsv or tars")
    model(asr, "asr-conformer-en")
    asr.add_argument("--report", metavar="FILE", help="errors by type and the worst utterances: .md or .html")
    asr.add_argument("--normalizer", choices=["english", "basic", "none"], help="Whisper's, of both texts (default: "
                     "english for English, else basic)")  # fmt: skip
    asr.add_argument("--keep_marks", action="store_true", help="keep combining marks, which Brahmic scripts need")
    asr.add_argument("--limit", type=count, metavar="N", help="only the first N utterances")
    asr.add_argument("--output", choices=["table", "json"], default="table", help="on stdout (default: table)")
    flags = cli_transcribe
    for group in (flags.speed, flags.decoding, flags.checks, flags.voice, flags.language):
        group(asr.add_argument_group(f"transcription: {group.__name__}"))
