r"""Trains the shipped English recogniser: a Conformer with a CTC output and a small attention decoder, on a CPU.

    data=../shared/data/speech
    python recipes/speech/train_asr.py --train $data/speechocean762/train.jsonl $data/an4/train.jsonl \
        $data/fsdd/train.jsonl synth/train.jsonl --valid $data/speechocean762/valid.jsonl --run run-asr \
        --out asr-first
    python recipes/speech/train_asr.py --init asr-first --train $data/speechocean762/train.jsonl=2 \
        $data/an4/train.jsonl=2 $data/fsdd/train.jsonl synth/train.jsonl --valid $data/speechocean762/valid.jsonl \
        --run run-asr-2 --out asr-conformer-en --steps 8000 --easy 0 --rate 1e-3 --schedule wsd --decay 0.375 \
        --average 0.9995 --freq_masks 2

`synth` is made by speak.py (4 h for the first, 5 h of other sentences for the second). A manifest is heard so many
times an epoch as `=TIMES` says (0.5: a random half). `--init` keeps the tokenizer and the sizes of its checkpoint;
`--terms ctc` or `attention` trains one output alone; `--no-cache` makes features in `--workers` while it trains. What
is random about an utterance depends on the epoch and its number alone, so a run that is stopped and goes on with
`--resume` gives the same weights. `--chunk 16` trains a streaming model, whose frames wait for at most 0.64 s of sound
(and see 2.56 s before with `--left 64`): live transcription runs it chunk by chunk.

Cost: 46 minutes of one core (AMD EPYC with AVX-512 bf16) for the first command, 48 for the second, 3 GB of memory.
Padding of its batches 6.5 %. Word error rates in percent (`multimodal evaluate asr --whole_recordings`, whole test
splits), CTC best path / CTC prefix beam / attention / joint: AN4 10.6 / 9.7 / 8.1 / 6.1, FSDD 4.0 / 3.7 / 1.0 / 1.0,
speechocean762 62.9 / 63.0 / 47.3 / 47.3, LJSpeech (never seen) 83.1 / 85.5 / 78.9 / 74.0. The shipped weights come
from an earlier revision of the recipe; 6 steps of both were compared and are equal.
"""

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from multimodal.data.batching import Batching, padding_share, speech_plan
from multimodal.data.datasets.class_names import evenly
from multimodal.data.datasets.speech import SpeechCorpus
from multimodal.data.loader import Loader
from multimodal.data.remote.trust import Trust
from multimodal.data.sources import ListColumns
from multimodal.errors import UsageError
from multimodal.models.conformer import ConformerCTC
from multimodal.tasks.evaluate.speech.decoders import ErrorRates
from multimodal.tokens.text.bytepair import BytePairTokenizer
from multimodal.train.loop import Loop
from multimodal.train.objectives.augment_speech import PrepareSpeech, SpeechAugmentation, collate
from multimodal.train.objectives.recogniser import Recognition, Terms, joint_config, most_ids
from multimodal.train.optim import OptimSettings
from multimodal.train.recipe_cli import start
from multimodal.train.report import write_report
from multimodal.train.settings import LoopSettings
from multimodal.weights.folder import Checkpoint, save_folder
from multimodal.weights.load import load

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecogniserModelSettings:
    """Architecture of a new model; a model from `--init` has its own."""

    vocabulary: int = 320
    """byte-pair tokens, learnt from the transcripts; a few hundred leave the CTC's plateau sooner"""
    width: int = 144
    layers: int = 6
    decoder_layers: int = 2
    context: int = 200
    """most tokens of a text"""
    drop_path: float = 0.05
    chunk: int = 0
    """frames of 40 ms that a streaming model waits for (16 are good); 0: it hears whole utterances"""
    left: int = 0
    """earlier frames that each frame of a chunk sees (0: all)"""


def loop_settings() -> LoopSettings:
    optim = OptimSettings(1.5e-3, warmup=300, floor=0.01, weight_decay=0.02, clip=3.0, average=0.999)
    return LoopSettings(Path("run-asr"), 6000, optim, threads=1, seed=1)


@dataclass(frozen=True)
class RecogniserRun:
    train: tuple[str, ...]
    """manifests, each PATH or PATH=TIMES"""
    valid: str
    out: Path
    """folder of the trained checkpoint"""
    init: str | None = None
    """checkpoint to begin with, instead of random weights"""
    card: Path | None = None
    """JSON file of facts to store with the weights"""
    terms: Terms = "joint"
    attention: float = 0.3
    """weight of the attention in `joint`, the rest is CTC's"""
    middle: float = 0.3
    """share of the CTC's weight for the middle layer"""
    cache: bool = True
    """hold all features in memory and in the run's folder; without, workers make them when they are needed"""
    valid_count: int = 100
    most_broken: float = 0.05
    """share of recordings, above which training stops"""
    model: RecogniserModelSettings = field(default_factory=RecogniserModelSettings)
    batching: Batching = field(default_factory=Batching)
    augmentation: SpeechAugmentation = field(default_factory=SpeechAugmentation)
    columns: ListColumns = field(default_factory=ListColumns)
    trust: Trust = field(default_factory=Trust)
    loop: LoopSettings = field(default_factory=loop_settings)


def begin(s: RecogniserRun, texts: list[str]) -> Checkpoint:
    """The model that training begins with, and its tokenizer."""
    torch.manual_seed(s.loop.seed)
    if s.init is not None:
        known = load(s.init)
        if not isinstance(known.model, ConformerCTC) or known.tokenizer is None:
            raise UsageError(f"--init {s.init}: is a {known.kind}, not a joint_conformer with its tokenizer")
        return known
    m = s.model
    if m.width % 8:
        raise UsageError(f"--width {m.width}: is no multiple of 8, for 4 heads of even width")
    if m.chunk < 0 or m.left < 0 or (m.left and not m.chunk):
        raise UsageError(f"--chunk {m.chunk} --left {m.left}: must be 0 or more, and left needs a chunk")
    tokenizer = BytePairTokenizer.train([" " + text for text in texts], m.vocabulary, lowercase=True)
    layers = 0 if s.terms == "ctc" else m.decoder_layers
    config = joint_config(tokenizer.vocab_size, m.width, m.layers, layers, m.context, m.drop_path, m.chunk, m.left)
    return Checkpoint(ConformerCTC(config), tokenizer)


def main(s: RecogniserRun) -> dict[str, Any]:
    cache = s.loop.run / "cache" if s.cache else None
    corpus = SpeechCorpus(s.train, cache, most_broken=s.most_broken, columns=s.columns, trust=s.trust)
    valid = SpeechCorpus([s.valid], s.loop.run / "cache", most_broken=s.most_broken, columns=s.columns, trust=s.trust)
    begun = begin(s, corpus.texts)
    corpus.encode(begun.tokenizer)
    objective = Recognition(begun.model, begun.tokenizer, s.terms, s.attention, s.middle)
    plan = speech_plan(corpus.lengths, corpus.times, s.batching, s.loop.seed)
    prepare = PrepareSpeech(s.augmentation, most_ids(begun.model))
    loader = Loader(
        corpus, plan, prepare, collate, seed=s.loop.seed, workers=s.loop.workers, micro=s.loop.accumulate,
        most_broken=s.most_broken,
    )  # fmt: skip
    share = padding_share(plan(s.batching.easy + 10), corpus.lengths)  # of an epoch that holds all
    log.info("%d utterances, %.2f h, %.1f%% padding", len(corpus), sum(corpus.lengths) / 360000, 100 * share)
    items = evenly(range(len(valid)), s.valid_count)
    decoder = "attention" if s.terms == "attention" else "greedy"
    watch = ErrorRates(begun, [valid.texts[i] for i in items], [valid.frames(i) for i in items], decoder)
    trained = Loop(s.loop, objective, loader, watch).fit()
    figures = watch(trained, s.loop.steps)
    card = json.loads(s.card.read_text(encoding="utf-8")) if s.card else dict(begun.card)
    save_folder(Checkpoint(trained, begun.tokenizer, card=card), s.out, torch.float16)
    write_report(s.loop.run, s, [*(path for path, _ in corpus.paths), s.valid], watch.examples)
    return figures


if __name__ == "__main__":
    start(main)
