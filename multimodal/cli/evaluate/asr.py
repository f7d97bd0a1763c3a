"""`multimodal evaluate asr`: word and character error rates of transcripts."""

import sys
import warnings
from argparse import Namespace
from typing import Any

from multimodal.cli import flags
from multimodal.cli.evaluate.figures import print_figures
from multimodal.cli.files import output_file, outputs_of, trust
from multimodal.cli.output import Progress, fail, print_json, printable
from multimodal.cli.parser import Help, Parser, count
from multimodal.cli.speech import flags as speech_flags
from multimodal.cli.speech.transcribe import api_options
from multimodal.errors import UsageError

OWN = ("command", "kind", "manifest", "report", "normalizer", "keep_marks", "limit", "output", "overwrite",
       "trust_paths", "remote", "whole_recordings")  # fmt: skip


def add_flags(p: Parser) -> None:
    p.usage, p.formatter_class = "%(prog)s MANIFEST [flags]", Help
    p.add_argument("manifest", metavar="MANIFEST", help="recordings and their texts: .jsonl, .csv, .tsv or tars")
    flags.model(p, "asr-conformer-en")
    p.add_argument("--report", metavar="FILE", help="write errors by type and the worst utterances: .md or .html")
    flags.overwrite(p)
    p.add_argument("--normalizer", choices=["english", "basic", "none"], help="Whisper's text normalizer "
                   "(default: english for English, else basic)")  # fmt: skip
    p.add_argument("--keep_marks", action="store_true", help="keep combining marks, which Brahmic scripts need")
    p.add_argument("--whole_recordings", action="store_true", help="measure the bare decoders, without windows, "
                   "thresholds or fallbacks: WER of each decoder of a Conformer; of a Whisper model, whose window must "
                   "hold each recording, also languages, no speech and BLEU of translations")  # fmt: skip
    p.add_argument("--limit", type=count, metavar="N", help="only the first N utterances")
    p.add_argument("--output", choices=["table", "json"], default="table", help="on stdout (default: table)")
    flags.lists(p)
    s = speech_flags
    for group in (s.speed, s.decoding, s.checks, s.voice, s.language):
        group(p.add_argument_group(f"transcription: {group.__name__}"))


def run(options: Namespace) -> int:
    from multimodal.tasks.evaluate.reports.transcripts import record, summary, write_report
    from multimodal.tasks.evaluate.transcripts import evaluate
    from multimodal.weights.load import load

    if options.whole_recordings:
        return _whole_recordings(options)
    given = {name: value for name, value in vars(options).items() if name not in OWN}
    given = {"vad_filter": False} | given  # utterances are cut already; cutting again costs letters at their edges
    report = output_file(options.report, "--report", (".md", ".html"), outputs_of(options))
    checkpoint = load(options.model, options.architecture)
    asked = api_options(given, checkpoint)
    shown, warn = Progress(options.manifest), warnings.showwarning

    def apart(*warning: Any, **rest: Any) -> None:
        shown.clear()
        warn(*warning, **rest)

    try:
        warnings.showwarning = apart
        result = evaluate(
            options.manifest, checkpoint, normalizer_name=options.normalizer, keep_marks=options.keep_marks,
            limit=options.limit, trust=trust(options), watch=shown, **asked,
        )  # fmt: skip
    finally:
        warnings.showwarning = warn
        shown.clear()
    for line in result.broken:
        fail(line)
    if options.output == "json":
        print_json(record(result))
    else:
        for line in summary(result):
            print(printable(line))
    sys.stdout.flush()
    if report is not None:
        write_report(result, report, {"manifest": options.manifest, "model": checkpoint.source, "options": asked})
    return int(bool(result.broken))


def _whole_recordings(options: Namespace) -> int:
    from multimodal.models.conformer import ConformerCTC
    from multimodal.tasks.evaluate.speech.decoders import DECODERS, DecoderOptions, evaluate_decoders
    from multimodal.tasks.evaluate.speech.whisper_windows import WindowOptions, evaluate_windows
    from multimodal.weights.load import load

    taken = {"language", "beam_size", "device", "threads", "architecture", "model", "quiet"}
    if other := sorted(vars(options).keys() - taken - {*OWN}):
        raise UsageError(f"--{other[0]}: does not apply to --whole_recordings")
    checkpoint, beam_size = load(options.model, options.architecture), getattr(options, "beam_size", None)
    checkpoint.model.to(getattr(options, "device", "cpu"))
    options.data = [options.manifest]

    def evaluate(manifest: str) -> tuple[dict[str, Any], list[str]]:
        if isinstance(checkpoint.model, ConformerCTC):
            decoders = DECODERS if checkpoint.model.decoder is not None else DECODERS[:2]
            chosen = DecoderOptions(decoders, beam_size or 10)
            return evaluate_decoders(checkpoint, manifest, chosen, options.limit, trust(options)), []
        windows = WindowOptions(getattr(options, "language", None), beam_size or 1)
        return evaluate_windows(checkpoint, manifest, windows, options.limit, trust(options)), []

    return print_figures(options, checkpoint.source, evaluate)
