"""Decoding of the hybrid CTC/attention Conformer (CTC best path, or beam search with CTC prefix scores and a language
model) and of transducers."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from multimodal.blocks.masks import padding
from multimodal.decoding import sampling
from multimodal.decoding.beam_search import beam_search
from multimodal.decoding.ctc import ctc_beam, ctc_greedy
from multimodal.decoding.ctc_prefix import CTCPrefixScorer
from multimodal.decoding.lm_fusion import LanguageModel, NeuralScorer, ShallowFusion, WordStarts
from multimodal.decoding.ngram import WordScorer, read_arpa
from multimodal.errors import CheckpointError, UsageError
from multimodal.inference.modules import inference_mode
from multimodal.inference.prepare import prepare_for_inference
from multimodal.models.conformer import ConformerCTC
from multimodal.models.speech.seq2seq import SpeechSeq2Seq
from multimodal.models.speech.transducer import Transducer
from multimodal.models.text import TextTransformer
from multimodal.system.assets import model_path
from multimodal.tasks.transcribe.conformer.text_decoder import check_decoding, decode_texts
from multimodal.tasks.transcribe.conformer.transducer import decode_all, fused
from multimodal.tasks.transcribe.conformer.words import ctc_words
from multimodal.tasks.transcribe.options import SpeechDecodingOptions
from multimodal.tasks.transcribe.results import WindowTranscript
from multimodal.tokens.audio.features import speech_features
from multimodal.tokens.text.hub.recognizers import WithEnd
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load

ARPA = (".arpa", ".arpa.gz")
KENLM = b"mmap lm http://kheafield.com/code"  # first bytes of lm/binary_format.cc


class Fusion(NamedTuple):
    """A language model for shallow fusion, and a mask of the next tokens that begin a word."""

    lm: LanguageModel
    starts: WordStarts


class HybridBeam(NamedTuple):
    """Beam search settings: `ctc_weight` of the CTC prefix score (0.3 in Watanabe et al. 2017); `lm`, `lm_weight`
    and `lm_bonus` (per word) as in `lm_fusion.ShallowFusion`."""

    size: int = 10
    ctc_weight: float = 0.3
    lm: Fusion | None = None
    lm_weight: float = 0.3
    lm_bonus: float = 0.0


@inference_mode()
def decode_windows(
    waves: list[Tensor], checkpoint: Checkpoint, options: SpeechDecodingOptions | None = None
) -> list[WindowTranscript]:
    """Transcribe each waveform (16 kHz). Results do not depend on the batch."""
    model: ConformerCTC | Transducer | SpeechSeq2Seq = checkpoint.model
    device, encoder = next(model.parameters()).device, model.config.encoder
    # on a CPU, one by one is as fast and makes the frames bitwise independent of the batch
    batches = [[wave] for wave in waves] if device.type == "cpu" else [waves]
    features = [
        speech_features(encoder.features, [wave.to(device) for wave in batch], encoder.bands) for batch in batches
    ]
    encoded = [model.encode(*batch) for batch in features]
    frames = [row[:count] for rows, _, counts in encoded for row, count in zip(rows, counts.tolist(), strict=True)]
    decoded = decode_frames(frames, checkpoint, options or SpeechDecodingOptions())
    return [one.snap_to_audio(wave) for one, wave in zip(decoded, waves, strict=True)]


@inference_mode()
def decode_frames(
    encoded: Sequence[Float[Tensor, "_ D"]], checkpoint: Checkpoint, options: SpeechDecodingOptions
) -> list[WindowTranscript]:
    """Transcribe the encoder's frames of each window."""
    model: ConformerCTC | Transducer | SpeechSeq2Seq = checkpoint.model
    if isinstance(model, Transducer):
        return _by_transducer(model, encoded, checkpoint, options)
    if isinstance(model, SpeechSeq2Seq):
        return decode_texts(checkpoint, tokenizer_of(checkpoint), encoded, options)
    blank = model.config.blank
    # window by window: the last bits of a matrix product may depend on its number of rows
    logprobs = [model.ctc_logits(frames[None])[0].float().log_softmax(-1) for frames in encoded]
    lengths = torch.tensor([len(frames) for frames in encoded], device=logprobs[0].device)
    best_path = torch.stack([own.amax(-1).sum() for own in logprobs]).tolist()
    empty = torch.stack([own[:, blank].sum().exp() for own in logprobs]).tolist()
    padded = pad_sequence(logprobs, batch_first=True)
    texts = ctc_greedy(padded, lengths, blank)
    scores = [score / (len(ids) + 1) for ids, score in zip(texts, best_path, strict=True)]
    if (beam := beam_of(checkpoint, options)) is not None:
        # a text longer than the decoder's context keeps the CTC best path
        context = model.decoder.config.context if model.decoder is not None else math.inf
        rows = [i for i, ids in enumerate(texts) if ids and len(ids) + 2 <= context]
        frames = pad_sequence(list(encoded), batch_first=True)
        searched = hybrid_beam_search(frames[rows], padded[rows], lengths[rows], checkpoint, beam).ids if rows else []
        for row, ids in zip(rows, searched, strict=True):
            texts[row] = ids
    seconds, tokenizer = model.config.encoder.seconds, tokenizer_of(checkpoint)
    return [
        WindowTranscript(ids, ctc_words(own, ids, tokenizer, blank, seconds), score, no_speech)
        for ids, own, score, no_speech in zip(texts, logprobs, scores, empty, strict=True)
    ]


def _by_transducer(
    model: Transducer, encoded: Sequence[Float[Tensor, "_ D"]], checkpoint: Checkpoint, options: SpeechDecodingOptions
) -> list[WindowTranscript]:
    options, fuse, end = with_language_model(checkpoint, options), None, None
    if options.lm is not None:
        device = next(model.parameters()).device
        end = search_tokenizer(checkpoint).eos_id
        fuse = fused(options.lm.lm, options.lm_weight, options.lm_bonus, options.lm.starts, device)
    beams = options.beam_size or (5 if fuse is not None else 1)
    return decode_all(model, encoded, tokenizer_of(checkpoint), beams, fuse, end)


Options = TypeVar("Options", bound=SpeechDecodingOptions)


def beam_of(checkpoint: Checkpoint, options: SpeechDecodingOptions) -> HybridBeam | None:
    """Beam search settings for a model; None: CTC best path. Raises as `language_model`."""
    attends = checkpoint.model.decoder is not None
    size = options.beam_size or (5 if attends or options.lm is not None else 1)
    if size == 1:
        return None
    weight = HybridBeam().ctc_weight if attends else 1.0
    lm = with_language_model(checkpoint, options).lm
    return HybridBeam(size, weight, lm=lm, lm_weight=options.lm_weight, lm_bonus=options.lm_bonus)


def with_language_model(checkpoint: Checkpoint, options: Options) -> Options:
    """The options with their language model loaded. Raises as `language_model`, and UsageError for what the model lacks
    for an option."""
    if isinstance(checkpoint.model, SpeechSeq2Seq):
        check_decoding(checkpoint, tokenizer_of(checkpoint), options)
    if options.lm is None or isinstance(options.lm, Fusion):
        return options
    tokenizer, device = search_tokenizer(checkpoint), next(checkpoint.model.parameters()).device
    lm = language_model(str(options.lm), tokenizer, device)
    return options.replace(lm=Fusion(lm, WordStarts(tokenizer, device)))


def language_model(path: str, tokenizer: Tokenizer, device: torch.device) -> LanguageModel:
    """Load an ARPA file, or a causal text model from its checkpoint folder or by its shipped name.

    Raises UsageError for a missing path, CheckpointError for one that is unreadable or does not fit."""
    if not model_path(path).exists():
        raise UsageError(f"{path}: does not exist", argument="lm")
    if path.endswith(ARPA):
        return WordScorer(read_arpa(path), tokenizer)
    _check_not_ngrams(model_path(path))
    lm = load(path)
    if not isinstance(lm.model, TextTransformer) or not lm.model.config.causal or lm.model.config.tied is None:
        raise CheckpointError(f"lm {path}: expected a causal text model with logits, got {lm.kind}")
    if lm.model.config.vocabulary != tokenizer.vocab_size or tokenizer.bos_id is None:
        expected = f"expected the recognizer's {tokenizer.vocab_size} tokens and a start token"
        raise CheckpointError(f"lm {path}: {expected}, got {lm.model.config.vocabulary} tokens")
    return NeuralScorer(prepare_for_inference(lm, "float32", device).model, tokenizer.bos_id)


def _check_not_ngrams(path: Path) -> None:
    """Raise UsageError for a folder around an ARPA file, CheckpointError for KenLM's binary format."""
    if path.is_dir() and not (path / "config.json").exists():
        if found := [str(one) for one in sorted(path.iterdir()) if one.name.endswith(ARPA)]:
            raise UsageError(f"{path}: expected an ARPA file or a text model, got a folder around {found[0]}",
                             argument="lm")  # fmt: skip
    elif path.is_file():
        with path.open("rb") as file:
            if file.read(len(KENLM)) == KENLM:
                raise CheckpointError(f"lm {path}: KenLM's binary format is not read; expected its ARPA file")


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    """Raises CheckpointError for a checkpoint whose tokenizer is missing or does not fit its model."""
    if checkpoint.tokenizer is None or checkpoint.tokenizer.vocab_size != checkpoint.model.config.vocabulary:
        size = checkpoint.model.config.vocabulary
        raise CheckpointError(f"{checkpoint.source}: checkpoint has no tokenizer with the model's {size} tokens")
    return checkpoint.tokenizer


def search_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer, with an id for the start and end of texts if a model without attention decoder has none. Raises as
    `tokenizer_of`."""
    tokenizer = tokenizer_of(checkpoint)
    attends = getattr(checkpoint.model, "decoder", None) is not None
    ends = tokenizer.bos_id is not None and tokenizer.eos_id is not None
    return tokenizer if ends or attends else WithEnd(tokenizer)


@inference_mode()
def hybrid_beam_search(
    frames: Float[Tensor, "B T D"], logprobs: Float[Tensor, "B T W"], lengths: Int[Tensor, "B"],
    checkpoint: Checkpoint, options: HybridBeam,
) -> sampling.SampledTokens:  # fmt: skip
    """Beam search of the attention decoder with CTC prefix scores over the first `lengths` frames (Watanabe et al.
    2017). Weight 0 is the decoder alone; weight 1 is the CTC alone, a prefix beam search over frames.

    A joint search ends when no live hypothesis can overtake the best finished one: stopping after `size` finished
    ones, as openai-whisper does, fills them with short texts while a confident model is still spelling its answer."""
    model, tokenizer = checkpoint.model, search_tokenizer(checkpoint)
    if tokenizer.bos_id is None or tokenizer.eos_id is None:
        raise CheckpointError(f"{checkpoint.source}: beam search needs a tokenizer with start and end tokens")
    if options.ctc_weight == 1:
        return _ctc_beams(logprobs, lengths, model.config.blank, tokenizer.eos_id, options)
    prompt = torch.full((len(frames), 1), tokenizer.bos_id, device=frames.device)
    # CTC itself emits at most one token per frame: no need to wait for a GPU's lengths
    sizes = [logprobs.shape[1]] * len(frames) if options.ctc_weight else lengths.tolist()
    limits, scorer = [min(model.decoder.config.context - 1, size + 1) for size in sizes], None
    if options.ctc_weight:
        scorer = CTCPrefixScorer(logprobs, lengths, tokenizer.eos_id, 1, options.ctc_weight)
    if options.lm is not None:
        lm, starts = options.lm
        scorer = ShallowFusion(scorer, lm, options.lm_weight, 1, options.lm_bonus, starts)
    step = sampling.cross_attention_step(model.decode, frames, padding(lengths, frames.shape[1]))
    return beam_search(
        step, prompt, model.decoder.new_cache(), eos=tokenizer.eos_id, max_new=limits, beams=options.size,
        patience=math.inf, length_penalty=0.0, scorer=scorer,
    )  # fmt: skip


def _ctc_beams(
    logprobs: Float[Tensor, "B T W"], lengths: Int[Tensor, "B"], blank: int, end: int, options: HybridBeam
) -> sampling.SampledTokens:  # fmt: skip
    fuse = None
    if options.lm is not None:
        fuse = fused(options.lm.lm, options.lm_weight, options.lm_bonus, options.lm.starts, logprobs.device)
    rows = zip(logprobs, lengths.tolist(), strict=True)
    found = [ctc_beam(own[:count], blank, options.size, fuse, end) for own, count in rows]
    return sampling.SampledTokens([ids for ids, _ in found], [score for _, score in found])
