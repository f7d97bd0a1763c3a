"""Windows to words by the joint CTC/attention model: its CTC best path, or beams with CTC prefix scores and a language
model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from multimodal.blocks.cache import Cache
from multimodal.blocks.masks import padding
from multimodal.decoding import sampling
from multimodal.decoding.beam_search import beam
from multimodal.decoding.ctc import ctc_greedy
from multimodal.decoding.ctc_prefix import PrefixScorer
from multimodal.decoding.lm_fusion import LanguageModel, NeuralScorer, fused, word_starts
from multimodal.errors import CheckpointError, UsageError
from multimodal.models.text import TextTransformer
from multimodal.models.whisper import JointConformer
from multimodal.tasks.transcribe.conformer.words import ctc_words
from multimodal.tasks.transcribe.word_times import WordTiming, on_sound, wave_level
from multimodal.tokens.audio.log_mel import HOP, RATE, filterbank_batch
from multimodal.tokens.text.vocabulary import Tokenizer
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load


class Fusion(NamedTuple):
    """A language model, and which of the recogniser's tokens begin a word."""

    lm: LanguageModel
    starts: Bool[Tensor, "V"]


class JointBeam(NamedTuple):
    """`ctc_weight` of the CTC score, 0.3 as in Watanabe et al. 2017. `length_penalty`: see `beams.beam`. `lm`,
    `lm_weight` and `lm_bonus` (a word): see `fusion.fused`."""

    size: int = 10
    ctc_weight: float = 0.3
    length_penalty: float | None = 0.0
    lm: Fusion | None = None
    lm_weight: float = 0.3
    lm_bonus: float = 0.0


@dataclass(frozen=True)
class JointOptions:
    """`beam_size` 1 is the CTC best path. None: 5 where there is an attention decoder or a language model, whose error
    rate is a third to a half lower, else 1; without the decoder a beam is a CTC prefix beam.

    `lm`: a checkpoint folder of a causal text model with the recogniser's tokens, or an ARPA file (.arpa, .arpa.gz),
    which each call reads again, or what `with_language_model` has loaded of it for several calls;
    `lm_weight` of its log-probabilities, `lm_bonus` a word. A window has no text where the CTC's probability of an
    empty one is above `no_speech_threshold`, the average log-probability under `logprob_threshold`, or the mean
    probability of its words under `confidence_threshold`. What noise gives differs between models, so the last two
    belong into a model's card."""

    beam_size: int | None = None
    word_timestamps: bool = False
    no_speech_threshold: float | None = 0.6
    logprob_threshold: float | None = None
    confidence_threshold: float | None = None
    lm: str | Path | Fusion | None = None
    lm_weight: float = 0.3
    lm_bonus: float = 0.0

    def __post_init__(self):
        if self.beam_size is not None and self.beam_size < 1:
            raise UsageError(f"beam_size: must be at least 1 ({self.beam_size})")
        if self.lm is not None and self.beam_size == 1:
            raise UsageError(f"lm {self.lm}: needs a beam_size above 1")
        if not (0 <= self.lm_weight < math.inf and math.isfinite(self.lm_bonus)):
            raise UsageError(
                f"lm_weight, lm_bonus: must be finite, the weight 0 or more {self.lm_weight, self.lm_bonus}"
            )


class Heard(NamedTuple):
    """What was decoded in one window; the words' times in seconds from its begin.

    `avg_logprob`: of the CTC best path a token, the end counted as one; a beam or a language model does not change it.
    `no_speech_prob`: the CTC probability that the text is empty."""

    ids: list[int]
    words: list[WordTiming]
    avg_logprob: float
    no_speech_prob: float

    def on_sound(self, wave: Float[Tensor, "T"]) -> "Heard":
        """With the words' times moved onto the sound of the window."""
        return self._replace(words=on_sound(self.words, wave_level(wave)))

    @property
    def confidence(self) -> float:
        """Mean probability of the words by the alignment; 1 without words."""
        return sum(word.probability for word in self.words) / len(self.words) if self.words else 1.0


@torch.inference_mode()
def decode_windows(waves: list[Tensor], checkpoint: Checkpoint, options: JointOptions | None = None) -> list[Heard]:
    """What is said in each waveform (16 kHz). Batched = alone."""
    model: JointConformer = checkpoint.model
    device, bands = model.ctc.weight.device, model.config.encoder.bands
    # on a CPU a batch is not faster, and one by one frames are the same to the bit in any batch
    batches = [[wave] for wave in waves] if device.type == "cpu" else [waves]
    encoded = [model.encode(*filterbank_batch([wave.to(device) for wave in batch], bands)) for batch in batches]
    whole = [row[:count] for rows, _, counts in encoded for row, count in zip(rows, counts.tolist(), strict=True)]
    found = decode_frames(whole, checkpoint, options or JointOptions())
    return [heard.on_sound(wave) for heard, wave in zip(found, waves, strict=True)]


@torch.inference_mode()
def decode_frames(
    encoded: Sequence[Float[Tensor, "_ D"]], checkpoint: Checkpoint, options: JointOptions
) -> list[Heard]:
    """What is said in the encoder's frames of each window."""
    model: JointConformer = checkpoint.model
    # a row of a product may depend on how many there are, in its last bits: each window has its own
    logprobs = [model.ctc_logits(frames[None])[0].float().log_softmax(-1) for frames in encoded]
    lengths = torch.tensor([len(frames) for frames in encoded], device=logprobs[0].device)
    looks = _best_path, partial(_empty, model.config.blank)
    best, silent = (torch.stack([look(own) for own in logprobs]).tolist() for look in looks)  # a GPU waits twice
    padded = pad_sequence(logprobs, batch_first=True)
    texts = ctc_greedy(padded, lengths, model.config.blank)
    scores = [score / (len(ids) + 1) for ids, score in zip(texts, best, strict=True)]
    if (beam := beam_of(checkpoint, options)) is not None:
        # a text longer than the decoder's context stays the CTC's, so that nothing is lost
        context = model.decoder.config.context if model.decoder is not None else math.inf
        rows = [i for i, ids in enumerate(texts) if ids and len(ids) + 2 <= context]
        frames = pad_sequence(list(encoded), batch_first=True)
        found = joint_beam(frames[rows], padded[rows], lengths[rows], checkpoint, beam).ids if rows else []
        for row, ids in zip(rows, found, strict=True):
            texts[row] = ids
    seconds = model.config.encoder.subsample * HOP / RATE
    aligned = partial(ctc_words, tokenizer=tokenizer_of(checkpoint), blank=model.config.blank, seconds_a_frame=seconds)
    return [
        Heard(ids, aligned(own, ids), score, empty)
        for ids, own, score, empty in zip(texts, logprobs, scores, silent, strict=True)
    ]


def _best_path(logprobs: Float[Tensor, "T W"]) -> Float[Tensor, ""]:
    return logprobs.amax(-1).sum()


def _empty(blank: int, logprobs: Float[Tensor, "T W"]) -> Float[Tensor, ""]:
    return logprobs[:, blank].sum().exp()


Options = TypeVar("Options", bound=JointOptions)


def beam_of(checkpoint: Checkpoint, options: JointOptions) -> JointBeam | None:
    """The beam search that a model does with these options; None: the CTC best path. Raises as
    `language_model`."""
    attends = checkpoint.model.decoder is not None
    size = options.beam_size or (5 if attends or options.lm is not None else 1)
    if size == 1:
        return None
    weight = JointBeam().ctc_weight if attends else 1.0
    lm = with_language_model(checkpoint, options).lm
    return JointBeam(size, weight, lm=lm, lm_weight=options.lm_weight, lm_bonus=options.lm_bonus)


def with_language_model(checkpoint: Checkpoint, options: Options) -> Options:
    """The options, their language model loaded for a recogniser. Raises as `language_model`."""
    if options.lm is None or isinstance(options.lm, Fusion):
        return options
    tokenizer = tokenizer_of(checkpoint)
    lm = language_model(str(options.lm), tokenizer, next(checkpoint.model.parameters()).device)
    return replace(options, lm=Fusion(lm, word_starts(tokenizer)))


def language_model(path: str, tokenizer: Tokenizer, device: torch.device) -> LanguageModel:
    """Of an ARPA file, or of a checkpoint folder of a causal text model.

    Raises UsageError where nothing is there, CheckpointError for one that cannot be read or does not fit."""
    if not Path(path).exists():
        raise UsageError(f"lm {path}: does not exist")
    if path.endswith((".arpa", ".arpa.gz")):
        from multimodal.decoding.ngram import ngram_scorer

        return ngram_scorer(path, tokenizer)
    found = load(path)
    if not isinstance(found.model, TextTransformer) or not found.model.config.causal or found.model.config.tied is None:
        raise CheckpointError(f"lm {path}: is a {found.kind}, not a causal text model with logits")
    if found.model.config.vocabulary != tokenizer.vocab_size or tokenizer.bos_id is None:
        own = found.model.config.vocabulary
        raise CheckpointError(f"lm {path}: has {own} tokens, not the recogniser's {tokenizer.vocab_size} with a start")
    return NeuralScorer(found.model.to(device), tokenizer.bos_id)


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    """Raises CheckpointError where the checkpoint's tokenizer is missing or does not fit its model."""
    if checkpoint.tokenizer is None or checkpoint.tokenizer.vocab_size != checkpoint.model.config.vocabulary:
        raise CheckpointError(f"{checkpoint.source}: no tokenizer of {checkpoint.model.config.vocabulary} ids with it")
    return checkpoint.tokenizer


@torch.inference_mode()
def joint_beam(
    frames: Float[Tensor, "B T D"], logprobs: Float[Tensor, "B T W"], lengths: Int[Tensor, "B"],
    checkpoint: Checkpoint, options: JointBeam,
) -> sampling.Decoded:  # fmt: skip
    """Beam search of the attention decoder with CTC prefix scores, of which `lengths` frames are real (Watanabe et
    al. 2017). It ends when no going text can overtake the best ended one: a stop at the first `size` endings, as
    openai-whisper has it, fills them with short texts while a sure model still spells its answer.

    Weight 0 is the decoder alone, weight 1 the CTC alone, which then is a prefix beam search."""
    model, tokenizer = checkpoint.model, tokenizer_of(checkpoint)
    if tokenizer.bos_id is None or tokenizer.eos_id is None:
        raise CheckpointError(f"{checkpoint.source}: its tokenizer has no start and end ids, which a beam needs")
    prompt = torch.full((len(frames), 1), tokenizer.bos_id, device=frames.device)
    room, scorer = logprobs.shape[1] + 1, None  # CTC writes at most one token a frame
    if options.ctc_weight:
        scorer = PrefixScorer(logprobs, lengths, tokenizer.eos_id, 1, options.ctc_weight)
    if options.lm is not None:
        lm, starts = options.lm
        scorer = fused(scorer, lm, options.lm_weight, 1, tokenizer.eos_id, options.lm_bonus, starts)
    if options.ctc_weight == 1:
        step, cache = partial(_indifferent, model.config.vocabulary), Cache(0)
    else:
        room = min(model.decoder.config.context - 1, room)
        step, cache = (
            sampling.over_source(model.attend, frames, padding(lengths, frames.shape[1])),
            model.decoder.new_cache(),
        )
    return beam(
        step, prompt, cache, eos=tokenizer.eos_id, max_new=room, beams=options.size, patience=math.inf,
        length_penalty=options.length_penalty, scorer=scorer,
    )  # fmt: skip


def _indifferent(vocabulary: int, ids: Int[Tensor, "R T"], cache: Cache) -> Float[Tensor, "R T V"]:
    """Every next token is as good: the scorer decides."""
    return torch.zeros(*ids.shape, vocabulary, device=ids.device)
