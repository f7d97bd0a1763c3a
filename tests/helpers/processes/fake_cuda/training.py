"""Training steps of every family on a pretended GPU, as a recipe's loop makes them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.conformer import ConformerConfig
from multimodal.blocks.connector import ConnectorConfig
from multimodal.blocks.experts import ExpertsConfig
from multimodal.blocks.stack import transformer
from multimodal.data.batching import PaddedText
from multimodal.data.datasets.text import TokenBatch
from multimodal.models import presets_text
from multimodal.models.any_to_text import AnyToText, AnyToTextConfig
from multimodal.models.captioner import VisionEncoderDecoder, VisionEncoderDecoderConfig
from multimodal.models.clip import CLIP, CLIPConfig
from multimodal.models.coca import CoCa, CoCaConfig
from multimodal.models.conformer import ConformerCTC, ConformerCTCConfig, ConformerEncoderConfig
from multimodal.models.encoder_decoder import EncoderDecoder
from multimodal.models.presets import whisper
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import PositionConfig, TextConfig
from multimodal.models.vit import ViT, ViTConfig
from multimodal.models.whisper import Whisper
from multimodal.tasks.ask.media import Medium
from multimodal.tokens.image.preprocessing import Preprocessing
from multimodal.tokens.image.tiles import Tiled
from multimodal.train.loop import Loop
from multimodal.train.objective import Objective
from multimodal.train.objectives.any_to_text import Answering, ChatBatch, Input
from multimodal.train.objectives.augment_speech import SpeechBatch
from multimodal.train.objectives.captioning import CaptionBatch, Captioning
from multimodal.train.objectives.classify import ImageClassBatch, SoftTargets
from multimodal.train.objectives.coca import ContrastiveCaptioning
from multimodal.train.objectives.contrastive import Contrastive, Pairs
from multimodal.train.objectives.multitask import LetterCTC, Multitask, MultitaskBatch
from multimodal.train.objectives.recognizer import Recognition
from multimodal.train.objectives.text.heads import TagTokens
from multimodal.train.objectives.text.language import Language
from multimodal.train.objectives.text.masked import MaskedBatch, MaskedLanguage
from multimodal.train.objectives.text.sentences import SentenceBatch, SentenceEncoder, SentencePairs
from multimodal.train.objectives.text.translation import PairBatch, Translating
from multimodal.train.optim import OptimSettings
from multimodal.train.settings import LoopSettings

from .device import waits
from .images import drawn_captions, drawn_images, drawn_pairs

SEEN = Preprocessing((32, 32), "shortest", "bicubic", (0.5,) * 3, (0.5,) * 3, 0, 1.0)
KINDS = ("learned", "sinusoidal", "rotary", "bucket", "alibi")
Scenario = Callable[[], None]


class Loader:
    rank, world = 0, 1

    def __init__(self, micro: int):
        self.micro = micro


def train(objective: Objective, *batches: Any, optimizer: str = "adamw", **options: Any) -> None:
    """Two steps; the waits are those of the second, which come back in each."""
    optim = OptimSettings(average=0.99, optimizer=optimizer)
    settings = LoopSettings(Path("none"), 10, optim, accumulate=len(batches), device="cuda", **options)
    loop = Loop(settings, objective, Loader(len(batches)))
    loop.step(list(batches))
    waits().found.clear()
    loop.step(list(batches))


def ids(rows: int, count: int, most: int = 99) -> torch.Tensor:
    return torch.randint(6, most, (rows, count))


def padded(rows: int, count: int) -> PaddedText:
    return PaddedText(ids(rows, count), torch.arange(count, count - rows, -1))


def clip_config() -> CLIPConfig:
    image = ViTConfig((32, 32), 16, transformer(64, 2, 1, 128), "token", class_token=True)
    return CLIPConfig(image, TextConfig(99, 16, transformer(64, 2, 1, 128), True), 32, "softmax", "eos", eos_id=5)


def clip(loss: str = "softmax") -> CLIP:
    return CLIP(replace(clip_config(), loss=loss))


def pairs(concepts: bool = True) -> Pairs:
    own = [torch.arange(4)] * 2 if concepts else []
    return Pairs(torch.randn(4, 3, 32, 32), ids(4, 16), torch.ones(4, 16, dtype=torch.bool), *own)


def coca() -> CoCa:
    known = clip_config()
    text = replace(known.text, stack=replace(known.text.stack, final_norm=False))
    image = replace(known.image, stack=replace(known.image.stack, final_norm=False), norm_after_pool=False)
    block = text.stack.block
    cross = replace(block, cross=replace(block.attention, source_width=32), cross_block=True)
    named = vars(known) | {"image": image, "text": text, "text_pool": "class", "text_valid": False}
    return CoCa(CoCaConfig(**named, decoder=replace(known.text.stack, block=cross), pad_id=0, queries=4, pool_heads=1))


def captioner() -> VisionEncoderDecoder:
    image = ViTConfig((32, 32), 16, transformer(64, 2, 1, 128), "none", class_token=True)
    text = transformer(64, 1, 2, 128, source_width=64)
    return VisionEncoderDecoder(VisionEncoderDecoderConfig(image, TextConfig(99, 28, text, causal=True, tied=True)))


def text(kind: str = "learned", causal: bool = True, experts: ExpertsConfig | None = None, **more: Any):
    stack = transformer(64, 2, 2, 128)
    stack = replace(stack, block=replace(stack.block, experts=experts))
    return TextTransformer(TextConfig(99, 64, stack, causal, True, positions=PositionConfig(kind), **more))


def encoder_decoder(name: str = "t5") -> EncoderDecoder:
    if name == "m2m100":
        waves = PositionConfig("sinusoidal", first=2, inclusive=True)
        made = presets_text.encoder_decoder(999, 64, 2, 128, waves, post_norm=False, scaled=True, start_id=2)
        return EncoderDecoder(made)
    return EncoderDecoder(presets_text.t5(64, 2, 2, 128, 32) if name == "t5" else presets_text.bart(64, 2))


def conformer(relative: bool = True, rotary: bool = False, **more: Any) -> ConformerCTC:
    block = ConformerConfig(AttentionConfig(64, 2, relative=relative, dropout=0.1), 128, 15, dropout=0.1, **more)
    words = TextConfig(31, 32, transformer(64, 1, 2, 128, source_width=64), causal=True, tied=True)
    return ConformerCTC(ConformerCTCConfig(ConformerEncoderConfig(80, block, 2, 4, 16, rotary), 31, words))


def any_to_text() -> AnyToText:
    image = ViTConfig((32, 32), 16, transformer(64, 2, 1, 128), "none", class_token=False)
    decoder = TextConfig(99, 64, transformer(64, 2, 2, 128), True, True, positions=PositionConfig("rotary"))
    connector = ConnectorConfig(64, 64, shuffle=2, hidden=64, positions=1)
    return AnyToText(AnyToTextConfig(decoder, (7,), image, connector))


class Marks:
    bos_id, eos_id, vocab_size = 0, 1, 31


def speech() -> SpeechBatch:
    return SpeechBatch(
        torch.randn(2, 160, 80), torch.tensor([160, 120]), ids(2, 8, 30), torch.tensor([8, 5]), [160, 120], [8, 5]
    )


def multitask() -> None:
    lines, letters = ids(3, 16), PaddedText(ids(2, 7, 20), torch.tensor([7, 4]))
    batch = MultitaskBatch(torch.randn(2, 80, 3000), lines, lines, torch.tensor([0, 0, 1]), letters.ids, [7, 4])
    train(Multitask(LetterCTC(Whisper(whisper(128, 2, 2, 51865)), 26)), batch)


def masked() -> None:
    model = text(causal=False, transform=True, head_bias=True, segments=2, pool="tanh", classes=2, stem_norm=True)
    lines, count = padded(4, 32), 128  # a mask selects all of fake tensors
    chosen = torch.ones(4, 32, dtype=torch.bool)
    batch = MaskedBatch(lines.ids, lines.lengths, chosen, torch.randint(0, 99, (count,)), torch.rand(count),
                        torch.zeros_like(lines.ids), torch.tensor([0, 1, 0, 1]))  # fmt: skip
    train(MaskedLanguage(model), batch)


def tagging() -> None:
    from multimodal.train.objectives.text.heads import TagBatch

    lines = padded(4, 32)
    train(TagTokens(text(causal=False, tags=5)), TagBatch(lines.ids, lines.lengths, torch.randint(0, 5, (4, 32))))


def answering() -> None:
    lines = padded(3, 24)
    pixels = torch.randn(1, 3, 32, 32)
    media = [Input(Medium("image", pixels, tile=Tiled(pixels, (0, 0), (32, 32))))] * 2
    batch = ChatBatch(lines.ids, lines.lengths, lines.ids, media, [1, 0, 1], [24, 23, 22], [24, 23, 22])
    train(Answering(any_to_text(), SEEN), batch)


def sentences() -> None:
    train(SentencePairs(SentenceEncoder(text(causal=False))),
          SentenceBatch(padded(4, 16), padded(4, 16), torch.arange(4)))  # fmt: skip


def documents() -> TokenBatch:
    lines = ids(4, 32)
    places = torch.arange(32).expand(4, -1).contiguous()
    return TokenBatch(lines, lines, torch.zeros_like(lines), places, lines > 50)


def scenarios() -> Iterator[tuple[str, Scenario]]:
    tokens = lambda: TokenBatch(ids(4, 32), ids(4, 32))
    table = lambda: torch.ones(4, 4, dtype=torch.bool)
    captions = lambda: CaptionBatch(ids(3, 12), torch.tensor([5, 7, 12]), torch.randn(2, 3, 32, 32),
                                    torch.tensor([0, 1, -1]))  # fmt: skip
    classifier = lambda: ViT(ViTConfig((32, 32), 16, transformer(64, 2, 1, 128, drop_path=0.1), "token",
                                       class_token=True, classes=10))  # fmt: skip
    images = lambda: ImageClassBatch(torch.randn(4, 3, 32, 32), torch.rand(4, 10))
    yield "CLIP softmax", lambda: train(Contrastive(clip(), table()), pairs())
    yield "CLIP softmax Muon", lambda: train(Contrastive(clip(), table()), pairs(), optimizer="muon")
    yield "CLIP softmax accumulated", lambda: train(Contrastive(clip(), table()), pairs(), pairs())
    yield "CLIP sigmoid", lambda: train(Contrastive(clip("sigmoid"), table()), pairs())
    yield "CLIP recomputed bfloat16", lambda: train(Contrastive(clip()), pairs(False), checkpointing=True,
                                                    precision="bfloat16")  # fmt: skip
    yield "CLIP float16", lambda: train(Contrastive(clip()), pairs(False), precision="float16")
    yield "CoCa", lambda: train(ContrastiveCaptioning(coca()), pairs())
    yield "captioner", lambda: train(Captioning(captioner()), captions())
    yield "ViT", lambda: train(SoftTargets(classifier()), images(), images())
    drawn, two, told = drawn_images(), drawn_pairs(*pairs(False)[1:3]), drawn_captions()  # real: made on the host
    yield "ViT augmented", lambda: train(SoftTargets(classifier()), drawn)
    yield "CLIP augmented", lambda: train(Contrastive(clip()), two)
    yield "captioner augmented", lambda: train(Captioning(captioner()), told)
    yield "sentence encoder", sentences
    for kind in KINDS:
        yield f"language model {kind}", lambda kind=kind: train(Language(text(kind)), tokens())
    yield "language model packed", lambda: train(Language(text()), documents())
    yield "Conformer joint", lambda: train(Recognition(conformer(), Marks()), speech())
    yield "Conformer rotary", lambda: train(Recognition(conformer(False, True), Marks()), speech())
    yield "Conformer batch norm", lambda: train(Recognition(conformer(conv_norm="batch"), Marks()), speech())
    yield "Whisper multitask", multitask
    yield "BERT masked", masked
    yield "tagging", tagging
    yield "any to text", answering
    for name in ("t5", "bart", "m2m100"):
        yield (
            f"{name} translating",
            lambda name=name: train(Translating(encoder_decoder(name)), PairBatch(padded(3, 12), padded(3, 10))),
        )
