r"""Train the shipped English recognizer: a Conformer with a CTC output and a small attention decoder, on a CPU.

    data=data/speech
    python recipes/speech/train_asr.py --train $data/speechocean762/train.jsonl $data/an4/train.jsonl \
        $data/fsdd/train.jsonl synth/train.jsonl --valid $data/speechocean762/valid.jsonl --run run-asr \
        --out asr-first
    python recipes/speech/train_asr.py --init asr-first --train $data/speechocean762/train.jsonl=2 \
        $data/an4/train.jsonl=2 $data/fsdd/train.jsonl synth/train.jsonl --valid $data/speechocean762/valid.jsonl \
        --run run-asr-2 --out asr-conformer-en --steps 8000 --easy 0 --rate 1e-3 --schedule wsd --decay 0.375 \
        --average 0.9995 --freq_masks 2

speak.py makes `synth` (4 h for the first, 5 h of other sentences for the second). `=TIMES` repeats a manifest in each
epoch (0.5: a random half). `--init` keeps the tokenizer and the sizes of its checkpoint; `--terms ctc` or `attention`
trains one output alone (`transcribe` needs the CTC output); `--no-cache` computes features in `--workers` during
training. An utterance's augmentation depends on the epoch and its number alone, so a resumed run ends with the same
weights.

`--chunk 16` trains a streaming model, whose frames wait for at most 0.64 s of audio (and see 2.56 s before with
`--left 64`): live transcription runs it chunk by chunk. With `--dynamic` 3 of 10 batches are seen whole: the same
model transcribes recordings and ends a stream's utterances as well as one without chunks (`multimodal evaluate asr
--chunked` measures its streams). Small chunks keep CTC on its plateau: 11,000 steps from nothing left a validation WER
of 0.98. So train first with `--chunk 1000 --dynamic`, which holds any utterance, then `--init` with `--chunk 16`; or
`--init` a model of whole utterances, whose convolutions keep what they weigh of earlier frames.

Cost: 46 minutes of one core (AMD EPYC with AVX-512 bf16) for the first command, 48 for the second, 3 GB of memory.
Batches are 6.5 % padding. The shipped asr-conformer-en had five runs more, from the result of these, for streams too:

    ... --init asr-conformer-en --chunk 16 --dynamic --train $data/speechocean762/train.jsonl=3 \
        $data/an4/train.jsonl=4 $data/fsdd/train.jsonl speech/s1.jsonl --easy 0 --rate 1e-3 --schedule wsd --decay 0.3 \
        --average 0.9995 --freq_masks 2 --warp 0.12 --channel 6 --noise 0.35 --speed 0.12 --steps 12500
    ... the same with --init from it, speechocean762=4, AN4=4, FSDD=4, speech/s1.jsonl speech/s2.jsonl, --decay 0.4
        --steps 6500
    ... the same with --init from it, speechocean762=4, AN4=4, FSDD=4, speech/s1.jsonl=0.3 speech/s3.jsonl --steps 5600
    python recipes/average.py --models asr-2 asr-3 --out asr-mean
    ... the same with --init asr-mean, AN4=5, FSDD=6, speech/s3.jsonl=0.3 speech/s4.jsonl
    python recipes/average.py --models asr-mean asr-4 --out asr-mean-2
    ... the same with --init asr-mean-2, speech/s5.jsonl
    python recipes/average.py --models asr-mean-2 asr-5 --weights 0.15 0.85 --out asr-conformer-en

`s1` to `s5`: 24, 6, 14, 14 and 11 h by speak.py; the first `average.py` takes the last two results. They took 1.7, 1.2,
1.1 and 0.9 hours of a core of an AMD EPYC with AVX2 alone (the first three resumed with fewer steps), the last 25
minutes of one with AVX-512 bf16. Half of the batches of the first four were seen whole. Word error rates in percent
(`multimodal evaluate asr --whole_recordings`, whole test splits, weights in 8 bits), CTC prefix beam / attention /
joint / joint with the language model asr-lm-en (`train_lm.py`): AN4 5.9 / 5.4 / 4.1 / 3.9, FSDD 1.3 / 1.0 / 0.7 / 0.7,
speechocean762 54.1 / 41.5 / 41.3 / 36.9, LJSpeech (never seen) 70.7 / 63.0 / 59.3 / 53.0; joint of `asr-mean-2` 4.3,
0.3, 41.2 and 58.8, before all five 6.1, 1.0, 47.3 and 74.0. In a stream, validation and AN4: 33.5 and 5.9 (as
recordings 31.4 and 3.9).
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from multimodal.data.batching import Batching, padding_share, speech_plan
from multimodal.data.datasets.class_names import evenly
from multimodal.data.datasets.speech import SpeechCorpus
from multimodal.data.remote.trust import Trust
from multimodal.data.sources import ListColumns
from multimodal.errors import UsageError, demand
from multimodal.models.conformer import ConformerCTC
from multimodal.system.files import read_json
from multimodal.system.options import Natural, Positive, Rate, Share
from multimodal.tasks.evaluate.speech.decoders import ErrorRates
from multimodal.tokens.text.bytepair import BytePairTokenizer
from multimodal.train import Loop, LoopSettings, OptimSettings, finish, log, start
from multimodal.train.lora import keep_sizes, with_rates
from multimodal.train.objectives.augment_speech import PrepareSpeech, SpeechAugmentation, collate
from multimodal.train.objectives.recognizer import (
    Recognition,
    Terms,
    check_features,
    joint_config,
    most_ids,
    warn_of_short,
)
from multimodal.weights.card import inherited
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load


@dataclass(frozen=True)
class RecognizerModelSettings:
    """Architecture of a new model; a model from `--init` has its own."""

    vocabulary: Positive = 320  # byte-pair tokens of the transcripts; with few, CTC leaves its plateau sooner
    width: Positive = 144
    layers: Positive = 6
    decoder_layers: Natural = 2
    context: Positive = 200  # tokens of a text, at most
    drop_path: Rate | None = None  # of the encoder: by default 0.05, with --init as it has it
    chunk: Natural = 0  # frames of 40 ms that a stream waits for (16 is good); 0: whole utterances, or as --init has it
    left: Natural = 0  # earlier frames that each frame of a chunk sees (0: all)
    dynamic: bool = False  # chunks in 7 of 10 batches alone: one model for recordings and streams

    def __post_init__(self):
        demand("left", self.left, self.chunk > 0 or not self.left, "0 without chunk")
        demand("dynamic", self.dynamic, self.chunk > 0 or not self.dynamic, "off without chunk")


@dataclass(frozen=True)
class RecognizerRun:
    train: tuple[str, ...]  # manifests, each PATH or PATH=TIMES
    valid: str  # manifest to measure on
    out: Path  # folder for the trained checkpoint
    init: str | None = None  # checkpoint to start from, instead of random weights
    card: Path | None = None  # JSON file of facts for the checkpoint's card
    terms: Terms = "joint"
    attention: Share = 0.3  # weight of the attention in `joint`; CTC has the rest
    middle: Rate = 0.3  # share of the CTC's weight for the middle layer
    cache: bool = True  # keep all features in memory and in the run's folder; without, workers compute them as needed
    valid_count: Positive = 100
    most_broken: Share = 0.05  # share of broken recordings above which training stops
    model: RecognizerModelSettings = RecognizerModelSettings()
    batching: Batching = Batching()
    augmentation: SpeechAugmentation = SpeechAugmentation()
    columns: ListColumns = ListColumns()
    trust: Trust = Trust()
    loop: LoopSettings = LoopSettings(
        Path("run-asr"), 6000,
        OptimSettings(1.5e-3, warmup=300, floor=0.01, weight_decay=0.02, clip=3.0, average=0.999), threads=1, seed=1,
    )  # fmt: skip


def begin(s: RecognizerRun, texts: list[str]) -> Checkpoint:
    """Return the model to train and its tokenizer."""
    torch.manual_seed(s.loop.seed)
    m = s.model
    if s.init is not None:
        known = load(s.init)
        if not isinstance(known.model, ConformerCTC) or known.tokenizer is None:
            raise UsageError(f"--init {s.init}: is a {known.kind}, not a joint_conformer with its tokenizer")
        encoder, decoder = known.model.config.encoder, known.model.config.decoder
        check_features(known)
        own = {"width": encoder.width, "layers": encoder.layers, "decoder_layers": 0}
        own |= {"decoder_layers": decoder.stack.layers, "context": decoder.context} if decoder else {}
        keep_sizes(s.init, own, m, RecognizerRun.model)
        known = replace(known, model=with_rates(known.model, {"encoder.drop_path": m.drop_path}))
        return rechunked(known, m) if m.chunk else known
    demand("width", m.width, m.width % 8 == 0, "a multiple of 8, for 4 heads of even width")
    tokenizer = BytePairTokenizer.train([" " + text for text in texts], m.vocabulary, lowercase=True)
    layers = 0 if s.terms == "ctc" else m.decoder_layers
    drop_path = 0.05 if m.drop_path is None else m.drop_path
    config = joint_config(
        tokenizer.vocab_size, m.width, m.layers, layers, m.context, drop_path, m.chunk, m.left, m.dynamic
    )
    return Checkpoint(ConformerCTC(config), tokenizer)


def rechunked(known: Checkpoint, m: RecognizerModelSettings) -> Checkpoint:
    """The same weights with other chunks. Convolutions that saw later frames keep the weights of the earlier ones."""
    config = known.model.config
    block = replace(config.encoder.block, conv_causal=True)
    try:
        encoder = replace(config.encoder, block=block, chunk=m.chunk, left=m.left, dynamic=m.dynamic)
        model = ConformerCTC(replace(config, encoder=encoder))
    except ValueError as error:  # such as a norm over all frames
        raise UsageError(f"--chunk {m.chunk}: {known.source} cannot have chunks: {error}") from None
    weights = known.model.state_dict()
    if not config.encoder.block.conv_causal:
        for name in [name for name in weights if name.endswith("depthwise.weight")]:
            weights[name] = F.pad(weights[name], ((block.kernel - 1) // 2, 0))[..., : block.kernel]
    model.load_state_dict(weights)
    return replace(known, model=model)


def main(s: RecognizerRun) -> dict[str, Any]:
    cache = s.loop.run / "cache" if s.cache else None
    corpus = SpeechCorpus(s.train, cache, most_broken=s.most_broken, columns=s.columns, trust=s.trust)
    valid = SpeechCorpus([s.valid], s.loop.run / "cache", most_broken=s.most_broken, columns=s.columns, trust=s.trust)
    initial = begin(s, corpus.texts)
    corpus.encode(initial.tokenizer)
    if s.terms == "attention":
        log.warning("the CTC output stays as it is, with which `transcribe` decodes, too; --terms joint trains both")
    else:
        warn_of_short(corpus, initial.model)
    objective = Recognition(initial.model, initial.tokenizer, s.terms, s.attention, s.middle)
    plan = speech_plan(corpus.lengths, corpus.times, s.batching, s.loop.seed)
    prepare = PrepareSpeech(s.augmentation, most_ids(initial.model))
    loader = s.loop.loader(corpus, plan, prepare, collate, s.most_broken)
    share = padding_share(plan(s.batching.easy + 10), corpus.lengths)  # of an epoch that holds all
    log.info("%d utterances, %.2f h, %.1f%% padding", len(corpus), sum(corpus.lengths) / 360000, 100 * share)
    items = evenly(range(len(valid)), s.valid_count)
    decoder = "attention" if s.terms == "attention" else "greedy"
    card = read_json(s.card) if s.card else inherited(initial.card)
    stated = replace(initial, card=card)  # with the language of the texts
    watch = ErrorRates(stated, [valid.written(i) for i in items], [valid.frames(i) for i in items], decoder)
    trained = Loop(s.loop, objective, loader, watch, initial).fit()
    figures = watch(trained, s.loop.steps)
    checkpoint = Checkpoint(trained, initial.tokenizer, card=card)
    sources = [*(path for path, _ in corpus.paths), s.valid]
    finish(s, checkpoint, sources, watch.examples, figures=figures, store="float16")
    return figures


if __name__ == "__main__":
    start(main)
