"""Tiny models for the tests, one configuration for each kind, with every weight random, and inputs for them."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.conformer import ConformerConfig
from multimodal.blocks.connector import ConnectorConfig
from multimodal.blocks.stack import StackConfig, transformer
from multimodal.models.any_to_text import AnyToText, AnyToTextConfig
from multimodal.models.captioner import VisionEncoderDecoder, VisionEncoderDecoderConfig
from multimodal.models.clip import CLIP, CLIPConfig
from multimodal.models.coca import CoCa, CoCaConfig
from multimodal.models.conformer import ConformerCTC, ConformerCTCConfig, ConformerEncoder, ConformerEncoderConfig
from multimodal.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from multimodal.models.speech.canary import Canary, CanaryConfig
from multimodal.models.speech.moonshine import Moonshine, MoonshineConfig, MoonshineEncoderConfig
from multimodal.models.speech.transducer import PredictionConfig, Transducer, TransducerConfig
from multimodal.models.tabular import FTTransformer, TabularConfig
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import PositionConfig, TextConfig
from multimodal.models.vision.git import GIT, GITConfig
from multimodal.models.vit import ViT, ViTConfig
from multimodal.models.whisper import Whisper, WhisperConfig, WhisperEncoderConfig
from multimodal.tokens.text.tokenizer import TextBatch

WIDTH, HEADS, VOCABULARY = 16, 2, 23
EOS = VOCABULARY - 1


def stack(**options) -> StackConfig:
    return transformer(WIDTH, 2, HEADS, 24, **options)


def text(causal: bool = True, tied: bool | None = None, source: bool = False, context: int = 12) -> TextConfig:
    return TextConfig(VOCABULARY, context, stack(source_width=WIDTH if source else None), causal, tied)


def conformer(subsample: int = 4, chunk: int = 0, rotary: bool = False, **block) -> ConformerEncoderConfig:
    block = {"attention": AttentionConfig(WIDTH, HEADS, relative=not rotary), "hidden": 24, "kernel": 5} | block
    return ConformerEncoderConfig(8, ConformerConfig(**block), 2, subsample, 4, rotary, chunk)


VIT = ViTConfig((8, 12), 4, stack(), "token", True, classes=5)
VITS = {
    "token": VIT,
    "mean": replace(VIT, pool="mean", class_token=False, stack=stack(final_norm=False), norm_after_pool=True),
    "map": replace(VIT, pool="map", class_token=False, classes=0),
    "registers": replace(VIT, registers=3, positions_on_prefix=False),
    "registers-mean": replace(VIT, registers=3, pool="mean", stem_norm=True, patch_bias=False, head_bias=False),
    "layer-scale": replace(VIT, stack=stack(layer_scale=True)),
}
CLIPS = {
    "softmax": CLIPConfig(replace(VIT, classes=0), text(), 6, "softmax", "eos", eos_id=VOCABULARY - 1),
    "sigmoid": CLIPConfig(VITS["map"], text(causal=False), WIDTH, "sigmoid", "last", image_project=False,
                          text_bias=True),
    "masked": CLIPConfig(replace(VIT, classes=0), text(causal=False), 6, "softmax", "eos", eos_id=VOCABULARY - 1,
                         text_valid=True),
}  # fmt: skip
CONFORMERS = {
    "relative": conformer(),
    "rotary": conformer(rotary=True, subsample=8),
    "chunk": conformer(chunk=2, conv_causal=True),
    "group": conformer(subsample=2, conv_norm="group", conv_first=True),
    "batch": conformer(subsample=1, conv_norm="batch", rotary=True, conv_bias=False, hidden=20),
}
SPEECH = WhisperConfig(WhisperEncoderConfig(8, 10, stack(key_bias=False)), text(tied=True, source=True))
JOINT = ConformerCTCConfig(conformer(), VOCABULARY, text(tied=False, source=True))
CAPTIONER = VisionEncoderDecoderConfig(replace(VIT, pool="none", classes=0), text(tied=True, source=True))
AFTER = {"stem_norm": True, "head_bias": True}  # as in BERT: post-norm
BERT = text(source=True, tied=True)
BERT = replace(
    BERT, stack=replace(BERT.stack, block=replace(BERT.stack.block, post_norm=True), final_norm=False),
    transform=True, **AFTER,
)  # fmt: skip
TRANSDUCER = TransducerConfig(conformer(), VOCABULARY, PredictionConfig(6, 1), 6, durations=(0, 1, 2))
MOONSHINE = MoonshineConfig(
    MoonshineEncoderConfig(stack(), PositionConfig("rotary")), text(source=True, tied=True), 1, 2
)
CANARY = CanaryConfig(conformer(), text(source=True, tied=True), 2, project=True)
GITS = GITConfig(CAPTIONER.image, replace(text(tied=False), **AFTER))
COCA = CoCaConfig(
    replace(VIT, classes=0, stack=stack(final_norm=False)), replace(text(), stack=stack(final_norm=False)), WIDTH,
    "softmax", "class", queries=3, pool_heads=HEADS, pad_id=0,
    decoder=replace(stack(), block=replace(stack(source_width=WIDTH).block, cross_block=True)),
)  # fmt: skip
TEXTS = {
    "learned": text(tied=True),
    **{kind: replace(text(tied=True), positions=PositionConfig(kind, buckets=8, furthest=9)) for kind in (
        "sinusoidal", "rotary", "bucket", "alibi")},
    "window": replace(text(tied=False), positions=PositionConfig("rotary", interleaved=True), window=3),
    "shaw": replace(
        text(tied=True), positions=PositionConfig("none"),
        stack=replace(stack(), block=replace(stack().block, attention=AttentionConfig(WIDTH, HEADS, shaw=3))),
    ),
    "linear": replace(
        text(tied=True),
        stack=replace(stack(), block=replace(stack().block, attention=AttentionConfig(WIDTH, HEADS, linear="causal"))),
    ),
    "llama": replace(
        text(tied=True), positions=PositionConfig("rotary"),
        stack=replace(stack(), block=replace(
            stack().block, attention=AttentionConfig(WIDTH, 4, kv_heads=2, bias=False), gated=True, activation="silu",
            norm="rms")),
    ),
}  # fmt: skip
ENCODER = replace(
    text(causal=False, tied=True), transform=True, segments=2, embed_width=8, pool="tanh", classes=3, **AFTER
)
TEXT_TO_TEXT = EncoderDecoderConfig(
    replace(text(causal=False), vocabulary=0, positions=PositionConfig("bucket")),
    replace(text(tied=True, source=True), positions=PositionConfig("bucket"), logit_scale=WIDTH**-0.5), start_id=0,
)  # fmt: skip
TABULAR = TabularConfig(3, (4, 2), 5, 2, stack())
PICTURE, SOUND = VOCABULARY - 2, VOCABULARY - 1  # placeholders
ANY = AnyToTextConfig(
    replace(TEXTS["llama"], context=40), (PICTURE, SOUND),
    replace(VIT, classes=0, pool="none"), ConnectorConfig(WIDTH, WIDTH, hidden=20),
    audio=WhisperEncoderConfig(8, 10, stack(key_bias=False)), audio_connector=ConnectorConfig(WIDTH, WIDTH, stack=4),
)  # fmt: skip
ANYS = {
    "any": ANY,
    "any-conformer": replace(ANY, audio=conformer(), audio_connector=ConnectorConfig(WIDTH, WIDTH, pool=2, norm=True)),
    "any-crossing": replace(
        ANY, decoder=text(tied=True, source=True), image_prefix=True,
        image_connector=ConnectorConfig(WIDTH, WIDTH, resampler=stack(source_width=WIDTH), queries=3),
    ),
    "any-image": replace(ANY, audio=None, audio_connector=None, image=replace(ANY.image, image=(8, 16)),
                         image_connector=ConnectorConfig(WIDTH, WIDTH, shuffle=2, bias=False, positions=2)),
}  # fmt: skip

ALL = {
    **{f"vit-{name}": (ViT, config) for name, config in VITS.items()},
    **{f"clip-{name}": (CLIP, config) for name, config in CLIPS.items()},
    **{f"conformer-{name}": (ConformerEncoder, config) for name, config in CONFORMERS.items()},
    "speech-to-text": (Whisper, SPEECH),
    "joint": (ConformerCTC, JOINT),
    "joint-ctc-alone": (ConformerCTC, replace(JOINT, decoder=None)),
    "transducer": (Transducer, TRANSDUCER),
    "moonshine": (Moonshine, MOONSHINE),
    "canary": (Canary, CANARY),
    "captioner": (VisionEncoderDecoder, CAPTIONER),
    "captioner-bert": (VisionEncoderDecoder, replace(CAPTIONER, decoder=BERT)),
    "git": (GIT, GITS),
    "coca": (CoCa, COCA),
    **{f"text-{name}": (TextTransformer, config) for name, config in TEXTS.items()},
    "text-encoder": (TextTransformer, ENCODER),
    "text-detector": (TextTransformer, replace(text(causal=False), detect=True)),
    "text-to-text": (EncoderDecoder, TEXT_TO_TEXT),
    "text-to-text-apart": (EncoderDecoder, replace(TEXT_TO_TEXT, encoder=text(causal=False))),
    **{name: (AnyToText, config) for name, config in ANYS.items()},
    "tabular": (FTTransformer, TABULAR),
}


def any_media(model: AnyToText, images: Tensor) -> list[Tensor]:
    """Rows of each image, and of a recording beside it if the model hears."""
    rows = [model.encode_images(images)]
    if model.audio is not None:
        frames = torch.arange(160 * len(images)).sin().view(len(images), 20, 8)
        conformer = isinstance(model.audio, ConformerEncoder)
        frames, lengths = frames.to(images.device), torch.full((len(images),), 20, device=images.device)
        heard = model.encode_audio(frames if conformer else frames.mT, lengths)
        rows.append(torch.stack(heard))
    return list(torch.cat(rows, 1))


@torch.no_grad()
def randomized(module: nn.Module, seed: int = 0) -> nn.Module:
    """Randomize every weight and statistic from `seed`: zeros and ones would hide a missing term. Sets eval mode."""
    source = torch.Generator().manual_seed(seed)
    for name, tensor in module.state_dict().items():
        if not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape, generator=source) * 0.25
        if name.endswith("running_var"):
            tensor.copy_(noise.exp())
        elif tensor.ndim == 0 or (tensor.ndim == 1 and name.endswith("weight")):  # a temperature, a norm's gain
            tensor.add_(noise)
        else:
            tensor.copy_(noise)
    return module.eval()


def made(name: str) -> nn.Module:
    kind, config = ALL[name]
    return randomized(kind(config))


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, EOS, (rows, length), generator=torch.Generator().manual_seed(seed))


def text_outputs(model: TextTransformer, ids: Tensor) -> Tensor:
    if model.config.segments:
        states = model.states(ids, segments=torch.tensor([[0, 0, 0, 1, 1, 1]] * 2, device=ids.device))
        return torch.cat([model.logits(states).flatten(), model.classes(model.pooled(states)).flatten()])
    return model.detect(model.states(ids)) if model.detect else model(ids)


def outputs(model: nn.Module) -> Tensor:
    """Return the outputs of two images, texts of 6 tokens or recordings, whichever the model takes."""
    device = next(model.parameters()).device
    ids = tokens(2, 6)
    ids[:, -1] = EOS
    ids, lengths = ids.to(device), torch.tensor([20, 13], device=device)
    given = lambda *shape: noise(2, *shape).to(device)
    # a prepared model is of a kind of its own
    kind = next(one.__name__ for one in type(model).__mro__ if one.__module__.startswith("multimodal.models"))
    if kind == "ViT":
        return model(given(3, 8, 12))
    if kind == "TextTransformer":
        return text_outputs(model, ids)
    if kind == "EncoderDecoder":
        return model(tokens(2, 7).to(device), ids)
    if kind == "CoCa":
        images = given(3, 8, 12)
        return torch.cat([model(images, ids).flatten(), model.outputs(images, ids)[2].flatten()])
    if kind in ("CLIP", "VisionEncoderDecoder", "GIT"):
        return model(given(3, 8, 12), ids)
    if kind == "AnyToText":
        media = any_media(model, given(3, *model.config.image.image))
        before = torch.full((2, 0 if model.config.crosses else len(media[0])), PICTURE, device=device)
        return model(torch.cat([before, ids % PICTURE], 1), media)
    if kind == "Whisper":
        return model(given(8, 20), ids)
    if kind == "FTTransformer":
        numbers = [[0.1, -0.5, float("nan")], [float("nan"), float("nan"), 2.0]]
        return model(torch.tensor(numbers, device=device), ids[:, :2] % 2)
    if kind == "ConformerEncoder":
        return model(given(20, WIDTH if model.stem is None else 8), lengths)[0]
    if kind == "Moonshine":
        return model(given(6400), torch.tensor([6400, 5000], device=device), ids)
    made = model(given(20, 8), lengths, ids)
    if kind in ("Transducer", "Canary"):
        return made if kind == "Canary" else made[0]
    ctc, _, decoded = made
    return ctc.sum() + (0 if decoded is None else decoded.sum())


def teach(
    model: VisionEncoderDecoder, pixels: Tensor, batch: TextBatch, steps: int, rate: float = 5e-3
) -> VisionEncoderDecoder:
    """Overfit the captions, in a second."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(steps):
        logits = model(pixels, batch.ids[:, :-1])
        loss = F.cross_entropy(logits[batch.mask[:, 1:]], batch.ids[:, 1:][batch.mask[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()
