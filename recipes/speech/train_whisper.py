"""Train a small Whisper-style model on one core: transcription in several languages, translation into English,
language identification, times, no speech.

    python recipes/speech/train_whisper.py --train speech/train-{en,de,fr,cs}.jsonl \\
        --valid speech/val-{en,de,fr,cs}.jsonl --run run-whisper --out whisper-mini \\
        --card recipes/data/whisper_card.json

Data: speak_languages.py, 48,000 clips, 32 h (47 clips longer than the window of 6 s are skipped). Cost: 8,600 steps
of 0.4 s, about an hour of one core with bfloat16 instructions; 2.0 M parameters, 4 MB. Result (`multimodal evaluate
asr --whole_recordings` on sentences of Multi30k's test_2016, greedy): WER en 10.6, de 8.2, fr 14.9, cs 11.3 %. Those
weights had five legs with `--resume` (see whisper_card.json); no unbroken run with the settings below has been
measured.

The shipped weights began with those, had 5,500 steps more on 84,000 clips, 62 h, then 10,500 on 148,700 clips, 113 h,
for which the sentences of French, Czech and a part of the English ones were spoken once more by other draws, and then
6,000 on 188,700 clips, 146 h, with other draws of French and German (whisper_card.json), 65 min of a core:

    ... --init whisper-mini --easy 0 --short 600 --pairs 0.25 --confused 0.1 --translated 0.2 --rate 1.5e-3 \\
        --warmup 100 --decay 0.4 --steps 6000

WER en 6.5, de 5.1, fr 7.6, cs 6.7 %; of an unseen voice 8.4, 6.7, 5.8, 8.6 %; languages 100 % right; no speech on
noise 100 %; BLEU into English de 17.2, fr 20.7, cs 14.2. Of the sentences 2.4 % are longer than the window.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

from multimodal.blocks.stack import transformer
from multimodal.data.datasets.speech_windows import Curriculum, SpeechWindows, curriculum
from multimodal.data.remote.trust import Trust
from multimodal.data.sources import ListColumns
from multimodal.errors import DataError, UsageError, multiple_of
from multimodal.models.text_config import TextConfig
from multimodal.models.whisper import Whisper, WhisperConfig, WhisperEncoderConfig
from multimodal.system.files import read_json
from multimodal.system.options import Natural, Positive, Rate, Share
from multimodal.tasks.evaluate.scores import bleu, word_errors
from multimodal.tasks.evaluate.speech import whisper_windows
from multimodal.tokens.text.tiktokens import WhisperTokenizer
from multimodal.tokens.text.whisper_small import SmallWhisperTokenizer
from multimodal.train import Loop, LoopSettings, OptimSettings, finish, log, start
from multimodal.train.lora import keep_sizes, with_rates
from multimodal.train.objectives.multitask import (
    STEP,
    LetterCTC,
    Multitask,
    PrepareWindow,
    collate,
    letters_of,
)
from multimodal.weights.card import inherited
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load

BANDS = 80


@dataclass(frozen=True)
class WhisperRun:
    train: tuple[Path, ...]  # manifests of speak_languages.py
    valid: tuple[Path, ...]  # held-out manifests, scored while training runs
    out: Path  # folder for the trained checkpoint
    card: Path | None = None  # JSON file of facts for the checkpoint's card
    init: str | None = None  # Whisper checkpoint to start from, with its tokenizer and sizes, instead of random weights
    language: str | None = None  # of recordings whose manifest names none
    vocabulary: Positive = 640  # text tokens
    width: Positive = 144
    heads: Positive = 3
    layers: Natural = 4  # of the encoder
    words: Positive = 2  # layers of the decoder
    hidden: Positive = 4  # width of a block's feed-forward, in widths
    dropout: Rate | None = None  # by default 0, with --init as it has it
    context: Positive = 160  # tokens of the decoder
    translated: Share = 0.3  # share of the windows that are also translated
    confused: Share = 0.15  # share of the decoder's input tokens replaced by others, so that it must listen
    most_valid: Positive = 24  # utterances of each language to score
    curriculum: Curriculum = Curriculum()
    columns: ListColumns = ListColumns()
    trust: Trust = Trust()
    loop: LoopSettings = LoopSettings(
        Path("run-whisper"), 8600,
        OptimSettings(2e-3, "muon", "wsd", warmup=150, decay=0.3, weight_decay=0.02, average=0.998),
        threads=1, save_every=400, evaluate_every=1000,
    )  # fmt: skip

    def __post_init__(self):
        multiple_of("heads", self, "width")


def config(s: WhisperRun, tokenizer: WhisperTokenizer) -> WhisperConfig:
    shape = {"heads": s.heads, "hidden": s.hidden * s.width, "key_bias": False, "dropout": s.dropout or 0.0}
    encoder = WhisperEncoderConfig(BANDS, s.curriculum.window // STEP, transformer(s.width, s.layers, **shape))
    words = transformer(s.width, s.words, source_width=s.width, **shape)
    return WhisperConfig(encoder, TextConfig(tokenizer.vocab_size, s.context, words, causal=True, tied=True))


def tokenizer_of(s: WhisperRun, data: SpeechWindows) -> SmallWhisperTokenizer:
    """Train a tokenizer on transcripts and translations; the languages are sorted, whatever the order of the files."""
    texts = [" " + text for clip in data.clips for text in (clip.text, clip.translation) if text]
    languages = sorted({clip.language for clip in data.clips})
    return SmallWhisperTokenizer.train(texts, s.vocabulary, languages, s.curriculum.window // STEP + 1)


def begin(s: WhisperRun, data: SpeechWindows) -> Checkpoint:
    """Return the model to train and its tokenizer."""
    if s.init is None:
        tokenizer = tokenizer_of(s, data)
        return Checkpoint(Whisper(config(s, tokenizer)), tokenizer)
    known = load(s.init)
    if not isinstance(known.model, Whisper) or not isinstance(known.tokenizer, WhisperTokenizer):
        raise UsageError(f"--init {s.init}: is a {known.kind}, not a whisper with its tokenizer")
    shape = known.model.config.encoder
    if (shape.bands, shape.context) != (BANDS, s.curriculum.window // STEP):
        raise UsageError(
            f"--init {s.init}: hears {shape.bands} bands and windows of {shape.context * STEP} frames; "
            f"expected {BANDS} and --window {s.curriculum.window}"
        )
    if unknown := sorted({clip.language for clip in data.clips} - set(known.tokenizer.languages)):
        raise UsageError(f"--init {s.init}: knows {', '.join(known.tokenizer.languages)}, not {', '.join(unknown)}")
    words, block = known.model.config.decoder, shape.stack.block
    own = {"width": shape.width, "heads": block.attention.heads, "hidden": block.hidden // shape.width}
    own |= {"layers": shape.stack.layers, "words": words.stack.layers, "context": words.context}
    keep_sizes(s.init, own, s, WhisperRun)
    rates = {f"{side}.stack.block.dropout": s.dropout for side in ("encoder", "decoder")}
    return replace(known, model=with_rates(known.model, rates))


class WhisperValidation:
    """Evaluation of greedy transcripts of held-out clips. `examples`: the last references and transcripts."""

    def __init__(self, data: SpeechWindows, tokenizer: WhisperTokenizer, window: int, most: int):
        fitting = [i for i in range(len(data)) if data.lengths[i] <= window]
        if not fitting:
            raise DataError(f"holds no recording of {len(data)} that fits {window / 100:g} s", argument="valid")
        if left := len(data) - len(fitting):
            log.warning("%d of %d validation recordings are not scored: over %g s", left, len(data), window / 100)
        languages = sorted({data.clips[i].language for i in fitting})
        if unknown := sorted(set(languages) - set(tokenizer.languages)):
            known = ", ".join(tokenizer.languages)
            raise DataError(f"names the language {unknown[0]!r}, not one of the model's ({known})", argument="valid")
        self.sets = {code: [i for i in fitting if data.clips[i].language == code][:most] for code in languages}
        self.data, self.tokenizer, self.window, self.examples = data, tokenizer, window, []

    def __call__(self, model: LetterCTC, step: int) -> dict[str, float | None]:
        scores: dict[str, float | None] = {}
        hits, silent, self.examples = [], [], []
        device = next(model.parameters()).device
        for language, own in self.sets.items():
            clips, mels = [self.data.clips[i] for i in own], [self.data.mels[i].float() for i in own]
            with torch.inference_mode():
                padded = torch.stack([F.pad(mel, (0, self.window - mel.shape[1])) for mel in mels])
                frames = model.speech.encoder(padded.to(device))
            result = whisper_windows.identify(model.speech, self.tokenizer, frames)
            hits += [guess == language for guess in result.languages]
            silent += [share > 0.6 for share in result.no_speech]
            texts = whisper_windows.decode(model.speech, self.tokenizer, frames, [language] * len(own))
            scores[f"wer_{language}"] = word_errors([c.text for c in clips], texts, language)["wer"]
            self.examples += [f"{c.text} | {text}" for c, text in zip(clips, texts, strict=True)][:3]
            if all(c.translation for c in clips):
                texts = whisper_windows.decode(model.speech, self.tokenizer, frames, [language] * len(own), "translate")
                scores[f"bleu_{language}"] = bleu([c.translation for c in clips], texts)
                self.examples += [f"{c.translation} | {text}" for c, text in zip(clips, texts, strict=True)][:3]
        return scores | {"language": sum(hits) / len(hits), "taken_for_silence": sum(silent) / len(silent)}


def main(s: WhisperRun) -> None:
    torch.manual_seed(s.loop.seed)
    window, cache = s.curriculum.window, s.loop.run / "cache"
    data, held_out = (
        SpeechWindows(manifests, cache, BANDS, s.language, columns=s.columns, trust=s.trust)
        for manifests in (s.train, s.valid)
    )
    initial, alphabet = begin(s, data), letters_of([clip.text for clip in data.clips])
    tokenizer, model = initial.tokenizer, LetterCTC(initial.model, len(alphabet))
    log.info(
        "%d clips, %.2f h, %d longer than the window; %d tokens", len(data), sum(data.lengths) / 360000,
        sum(length > window for length in data.lengths), tokenizer.vocab_size,
    )  # fmt: skip
    plan = curriculum(s.curriculum, data.lengths, [clip.language for clip in data.clips], s.loop.seed)
    prepare = PrepareWindow(tokenizer, alphabet, BANDS, translated=s.translated, confused=s.confused,
                            context=initial.model.config.decoder.context)  # fmt: skip
    loader = s.loop.loader(data, plan, prepare, collate)
    scores = WhisperValidation(held_out, tokenizer, window, s.most_valid)
    trained = Loop(s.loop, Multitask(model), loader, scores, Checkpoint(model, tokenizer)).fit()
    checkpoint = Checkpoint(trained.speech, tokenizer, card=read_json(s.card) if s.card else inherited(initial.card))
    finish(s, checkpoint, [*s.train, *s.valid], scores.examples, store="float16")


if __name__ == "__main__":
    start(main)
