"""Trains a small Whisper-style model on one core: transcription in several languages, translation into English,
language identification, times, no speech.

    python recipes/train_whisper.py --train speech/train-{en,de,fr,cs}.jsonl --valid speech/val-{en,de,fr,cs}.jsonl \\
        --run run-whisper --out whisper-mini --steps 8000

COST AND RESULT
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from multimodal.blocks.stack import transformer
from multimodal.models.seq2seq import SpeechToText, SpeechToTextConfig
from multimodal.models.speech import SpeechEncoderConfig
from multimodal.models.text import TextConfig
from multimodal.tokens.tiktokens import WhisperTokenizer
from multimodal.tokens.whisper_small import SmallWhisperTokenizer
from multimodal.train.clips import Clips, Curriculum, curriculum
from multimodal.train.loader import Loader
from multimodal.train.loop import Loop, LoopSettings
from multimodal.train.multitask import STEP, Lettered, Multitask, Prepare, collate, letters_of, listen, write
from multimodal.train.optim import OptimSettings
from multimodal.train.report import write_report
from multimodal.train.scores import bleu, word_errors
from multimodal.train.start import start
from multimodal.weights.folder import Checkpoint, save_folder

BANDS = 80


def loop_settings() -> LoopSettings:
    optim = OptimSettings(2e-3, "muon", "wsd", warmup=150, decay=0.3, weight_decay=0.02, average=0.998)
    return LoopSettings(Path("run-whisper"), 7800, optim, threads=1, save_every=400, evaluate_every=1000)


@dataclass(frozen=True)
class Settings:
    """`train`, `valid`: manifests of speak_languages.py. `vocabulary`: text tokens. `width`, `heads`, `layers`
    (encoder), `words` (layers of the decoder), `hidden` (times the width): sizes of the model. `context`: tokens of
    the decoder. `translated`: share of the windows that are also translated. `confused`: share of
    the text tokens that the decoder reads as others. `most_valid`: utterances of each language that are scored while
    it trains."""

    train: list[Path]
    valid: list[Path]
    out: Path
    vocabulary: int = 640
    width: int = 144
    heads: int = 3
    layers: int = 4
    words: int = 2
    hidden: int = 4
    dropout: float = 0.0
    context: int = 160
    translated: float = 0.3
    confused: float = 0.15
    most_valid: int = 24
    curriculum: Curriculum = field(default_factory=Curriculum)
    loop: LoopSettings = field(default_factory=loop_settings)


def config(s: Settings, tokenizer: WhisperTokenizer) -> SpeechToTextConfig:
    shape = {"heads": s.heads, "hidden": s.hidden * s.width, "key_bias": False, "dropout": s.dropout}
    encoder = SpeechEncoderConfig(BANDS, s.curriculum.window // STEP, transformer(s.width, s.layers, **shape))
    words = transformer(s.width, s.words, source_width=s.width, **shape)
    return SpeechToTextConfig(encoder, TextConfig(tokenizer.vocab_size, s.context, words, causal=True, tied=True))


def tokenizer_of(s: Settings, data: Clips) -> SmallWhisperTokenizer:
    """Learnt from the transcripts and their translations, in an order of languages that does not depend on that of
    the files."""
    texts = [" " + text for clip in data.clips for text in (clip.text, clip.translation) if text]
    languages = sorted({clip.language for clip in data.clips})
    return SmallWhisperTokenizer.train(texts, s.vocabulary, languages, s.curriculum.window // STEP + 1)


def evaluate(model: Lettered, step: int, data: Clips, tokenizer: WhisperTokenizer, window: int, most: int) -> dict:
    """Greedy texts of held-out clips in whole windows: WER of each language, BLEU into English, languages found."""
    scores: dict[str, float] = {}
    hits, silent, count = 0, 0, 0
    for language in sorted({clip.language for clip in data.clips}):
        own = [i for i, c in enumerate(data.clips) if c.language == language and data.lengths[i] <= window][:most]
        mels = torch.stack([F.pad(data.mels[i].float(), (0, window - data.lengths[i])) for i in own])
        with torch.inference_mode():
            frames = model.speech.encoder(mels)
        heard, clips = listen(model.speech, tokenizer, frames), [data.clips[i] for i in own]
        hits, count = hits + sum(found == language for found in heard.languages), count + len(own)
        silent += sum(share > 0.6 for share in heard.no_speech)
        texts = write(model.speech, tokenizer, frames, [language] * len(own))
        scores[f"wer_{language}"] = word_errors([c.text for c in clips], texts, language)["wer"]
        if all(c.translation for c in clips):
            texts = write(model.speech, tokenizer, frames, [language] * len(own), "translate")
            scores[f"bleu_{language}"] = bleu([c.translation for c in clips], texts)
        print(f"{language}: {clips[0].text!r} -> {texts[0]!r}", flush=True)
    return scores | {"language": hits / count, "taken_for_silence": silent / count}


def main(s: Settings) -> None:
    torch.manual_seed(s.loop.seed)
    cache = s.loop.run / "cache"
    data, held_out = Clips(s.train, cache, BANDS), Clips(s.valid, cache, BANDS)
    tokenizer, alphabet = tokenizer_of(s, data), letters_of([clip.text for clip in data.clips])
    model = Lettered(SpeechToText(config(s, tokenizer)), len(alphabet))
    size = sum(p.numel() for p in model.speech.parameters())
    left_out = sum(length > s.curriculum.window for length in data.lengths)
    print(f"{len(data)} clips, {sum(data.lengths) / 360000:.2f} h, {left_out} too long; {tokenizer.vocab_size} tokens; "
          f"{len(alphabet)} letters; {size / 1e6:.2f} M parameters", flush=True)  # fmt: skip
    plan = curriculum(s.curriculum, data.lengths, [clip.language for clip in data.clips], s.loop.seed)
    prepare = Prepare(tokenizer, alphabet, BANDS, translated=s.translated, confused=s.confused)
    loader = Loader(data, plan, prepare, collate, seed=s.loop.seed, workers=s.loop.workers, micro=s.loop.accumulate)
    scorer = partial(evaluate, data=held_out, tokenizer=tokenizer, window=s.curriculum.window, most=s.most_valid)
    trained = Loop(s.loop, Multitask(model), loader, scorer).fit()
    save_folder(Checkpoint(trained.speech, tokenizer), s.out, dtype=torch.float16)
    write_report(s.loop.run, s, [*s.train, *s.valid])


if __name__ == "__main__":
    start(main, Settings)
