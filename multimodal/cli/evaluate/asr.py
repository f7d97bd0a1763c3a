"""`multimodal evaluate asr`: word and character error rates of transcripts."""

from argparse import Namespace
from typing import Any

from multimodal.cli import flags
from multimodal.cli.console import Progress
from multimodal.cli.evaluate.figures import SetFigures, print_figures
from multimodal.cli.files import columns, output_file, outputs_of, trust
from multimodal.cli.loading import loaded
from multimodal.cli.output import fail, print_record
from multimodal.cli.parser import Parser
from multimodal.cli.speech import flags as speech_flags
from multimodal.cli.speech.transcribe import api_options, warn_of_no_effect
from multimodal.data.options import FirstOptions
from multimodal.errors import UsageError
from multimodal.system.options import add_flags as add_option_flags
from multimodal.tasks.evaluate.speech.options import NormalizerOptions

OWN = ("command", "kind", "manifest", "report", "normalizer", "keep_marks", "limit", "output", "format", "overwrite",
       "verbose", "trust_paths", "remote", "whole_recordings", "chunked", "path_column", "text_column")  # fmt: skip

EXAMPLES = """examples:
  multimodal evaluate asr test.csv --limit 100 --report report.html
  multimodal evaluate asr test.jsonl --model whisper-small --language de --format json --output wer.json

Utterances are cut already: --vad_filter is False for every model.
"""


def add_flags(p: Parser) -> None:
    p.usage, p.epilog = "%(prog)s MANIFEST [flags]", EXAMPLES
    p.add_argument("manifest", metavar="MANIFEST", help="recordings and their texts: .jsonl, .csv, .tsv or tars")
    flags.model(p, "transcribe")
    p.add_argument("--report", metavar="FILE", help="write errors by type and the worst utterances: .md or .html")
    add_option_flags(p, NormalizerOptions, defaults=True)
    p.add_argument("--keep_marks", action="store_true", help="keep combining marks, which Brahmic scripts need")
    p.add_argument("--whole_recordings", action="store_true", help="measure the bare decoders, without windows, "
                   "thresholds or fallbacks: WER of each decoder of a Conformer (fused: with the card's "
                   "language model); of a Whisper model, whose window must "
                   "hold each recording, also languages, no speech and BLEU of translations")  # fmt: skip
    p.add_argument(
        "--chunked",
        action="store_true",
        help="encode chunk by chunk, as a stream in progress does (models trained with train_asr.py --dynamic)",
    )
    add_option_flags(p, FirstOptions, defaults=True)
    flags.results(p, "table", "json")
    flags.lists(p, "path", "text")
    s = speech_flags
    for group in (s.speed, s.decoding, s.checks, s.voice, s.language):
        group(p.add_argument_group(f"transcription: {group.__name__}"))


def run(options: Namespace) -> int:
    from multimodal.data.sources import open_source
    from multimodal.tasks.evaluate.reports.recordings import recordings
    from multimodal.tasks.evaluate.reports.transcripts import record, summary, write_report
    from multimodal.tasks.evaluate.transcripts import evaluate

    vars(options).setdefault("device", "auto")
    if options.whole_recordings:
        return _whole_recordings(options)
    report = output_file(options.report, "--report", (".md", ".html"), outputs_of(options))
    checkpoint = _loaded(options)
    given = {name: value for name, value in vars(options).items() if name not in OWN}
    # utterances are cut already; cutting again costs letters at their edges
    asked = api_options({"vad_filter": False} | given, checkpoint)
    warn_of_no_effect(asked, checkpoint)
    result = evaluate(
        options.manifest, checkpoint, normalizer_name=options.normalizer, keep_marks=options.keep_marks,
        limit=options.limit, trust=trust(options), columns=columns(options), watch=Progress(options.manifest), **asked,
    )  # fmt: skip
    for line in result.broken:
        fail(line)
    print_record(options.format, record(result), summary(result))
    if report is not None:
        facts = {"manifest": options.manifest, "model": checkpoint.source, "options": asked}
        source = open_source(options.manifest, columns=columns(options), trust=trust(options))
        write_report(result, report, facts, lambda worst: recordings(worst, result.normal, source, checkpoint, asked))
    return int(bool(result.broken))


def _loaded(options: Namespace) -> Any:
    checkpoint = loaded(options, "transcribe")
    if options.chunked:
        encoder = checkpoint.model.encoder
        if not getattr(encoder.config, "chunk", 0):
            raise UsageError(f"--chunked: {checkpoint.source} has no chunks")
        encoder.chunked = True
    return checkpoint


def _whole_recordings(options: Namespace) -> int:
    from multimodal.models.conformer import ConformerCTC
    from multimodal.tasks.evaluate.speech.decoders import DECODERS, DecoderOptions, evaluate_decoders
    from multimodal.tasks.evaluate.speech.whisper_windows import WindowOptions, evaluate_windows
    from multimodal.tasks.transcribe.conformer.decode import beam_of
    from multimodal.tasks.transcribe.options import options_for

    taken = {"language", "beam_size", "device", "threads", "architecture", "model"}
    if other := sorted(vars(options).keys() - taken - {*OWN}):
        raise UsageError(f"--{other[0]}: does not apply to --whole_recordings")
    checkpoint, beam_size = _loaded(options), getattr(options, "beam_size", None)
    checkpoint.model.to(options.device)
    read = (options.limit, trust(options), columns(options))
    options.data = [options.manifest]
    texts = {"normalizer": options.normalizer, "keep_marks": options.keep_marks,
             "language": getattr(options, "language", None)}  # fmt: skip

    def evaluate(manifest: str) -> SetFigures:
        if checkpoint.kind in ("transducer", "moonshine", "canary"):
            raise UsageError(f"--whole_recordings: needs a Whisper or CTC model, got {checkpoint.kind}")
        if isinstance(checkpoint.model, ConformerCTC):
            decoders, size = DECODERS if checkpoint.model.decoder is not None else DECODERS[:2], beam_size or 10
            fused = beam_of(checkpoint, options_for(checkpoint, {"beam_size": size}))
            decoders = (*decoders, "fused") if fused and fused.lm else decoders
            chosen = DecoderOptions(decoders, size, fused=fused, **texts)
            return SetFigures(evaluate_decoders(checkpoint, manifest, chosen, *read))
        windows = WindowOptions(beam_size=beam_size or 1, **texts)
        return SetFigures(evaluate_windows(checkpoint, manifest, windows, *read))

    return print_figures(options, checkpoint.source, evaluate)
