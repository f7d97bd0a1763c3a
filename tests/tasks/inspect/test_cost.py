"""Costs equal measurements: operations, caches, weights, gradients, optimizer state and activations."""

import functools
import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from multimodal.blocks import sdpa
from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.stack import BlockConfig, StackConfig
from multimodal.errors import UsageError
from multimodal.models.presets import PRESETS, preset
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import PositionConfig, ProjectionConfig, TextConfig
from multimodal.tasks.inspect import cost_parts
from multimodal.tasks.inspect.cost import counts, of_config
from multimodal.train.optim import OptimSettings, optimizers
from multimodal.weights.folder import KINDS, Checkpoint, save_folder
from tests.helpers.commands import run as command
from tests.helpers.spread import spread, thin
from tests.helpers.tiny import ALL, SPEECH, TEXT_TO_TEXT, TEXTS, VIT, VOCABULARY, made, randomized, text

B, T = 2, 12
SECONDS = 0.4  # 40 frames


def ids(count: int = T, rows: int = B) -> Tensor:
    return torch.randint(3, VOCABULARY - 1, (rows, count), generator=torch.Generator().manual_seed(0))


def inputs(name: str, rows: int) -> tuple[Tensor, ...]:
    """Inputs of the whole model; texts have 12 tokens."""
    pixels, mel = torch.randn(rows, 3, 8, 12), torch.randn(rows, 8, 20)
    sound = torch.randn(rows, 40, 16 if name == "conformer-batch" else 8), torch.full((rows,), 40)
    if name.startswith("conformer"):
        return sound
    if name in ("transducer", "moonshine", "canary"):
        waves = torch.randn(rows, 6400), torch.full((rows,), 6400)
        return {"moonshine": (*waves, ids(rows=rows)), "canary": (*sound, ids(rows=rows))}.get(name, sound)
    if name == "tabular":
        return torch.randn(rows, 3), torch.ones(rows, 2, dtype=torch.long)
    words = ids(rows=rows)
    if name.startswith(("clip", "captioner", "git", "coca")):
        if name.startswith("clip"):
            words[:, -1] = VOCABULARY - 1
        return pixels, words
    return {"vit": (pixels,), "spee": (mel, words), "join": (*sound, words)}.get(
        name.split("-")[0][:4], (words, words) if name.startswith("text-to-text") else (words,)
    )


@functools.cache
def counted(name: str) -> dict:
    return counts(made(name), T, B, SECONDS)


def run(model: nn.Module, name: str, rows: int) -> object:
    given = inputs(name, rows)
    if name.startswith("any"):
        rows_of = model.encode_images(torch.randn(rows, 3, *model.config.image.image))
        if name == "any-conformer":
            rows_of = model.audio_connector(model.audio(torch.randn(rows, 40, 8), torch.full((rows,), 40))[0])
        elif model.audio is not None:
            rows_of = model.audio_connector(model.audio(torch.randn(rows, 8, 20)))
        return model.decoder(*given, rows_of if model.config.crosses else None)
    if name == "transducer":
        return model.join(model.encode(*given)[0], model.predict(torch.full((rows, 1), VOCABULARY))[0])
    if name == "coca":
        return model.outputs(*given)
    if name == "text-encoder":
        states = model.states(*given)
        return model.logits(states), model.classes(model.pooled(states))
    if name == "text-detector":
        return model.detect(model.states(*given))
    return model(*given)


# with the matrices of others
LIKE = {"vit-mean", "vit-registers", "vit-registers-mean", "vit-layer-scale", "clip-masked", "clip-sigmoid",
        "text-sinusoidal", "text-rotary", "text-alibi", "text-window", "text-shaw", "text-to-text-apart",
        "captioner-bert", "conformer-group", "conformer-rotary", "conformer-chunk", "conformer-batch",
        "joint-ctc-alone", "text-linear", "any", "any-image", "any-conformer", "any-crossing", "transducer", "canary",
        "vit-map", "git"}  # fmt: skip


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.slow if name in LIKE else pytest.mark.ci) for name in ALL
])  # fmt: skip
def test_operations_are_those_that_pytorch_counts(name):
    model = made(name)
    said = counted(name)["flops"]
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # it knows no CPU's fused kernel
        run(model, name, B)
    known = counter.get_total_flops()
    if name.startswith("clip"):
        known -= B * B * 2 * model.config.embed  # the cosines
    assert B * sum(part["forward"] for part in said.values()) == known


@pytest.mark.ci
@pytest.mark.parametrize("heads", [{"tags": 5}, {"spans": True}, {"projections": (ProjectionConfig(7, "tanh"),)}])
def test_operations_of_heads(heads):
    (part,) = counts(replace(text(causal=False), **heads), T, B)["flops"].values()
    model = randomized(TextTransformer(replace(text(causal=False), **heads)))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        states = model.states(ids())
        (model.tags or model.spans)(states) if model.project is None else model.project(states[:, 0])
    assert B * part["forward"] == counter.get_total_flops()


@pytest.mark.ci
def test_of_a_token_and_of_training():
    part = counts(made("text-llama"), length=8)["flops"]["text"]
    assert part["forward_a_token"] == part["forward"] / 8
    assert part["training_a_token"] == 3 * part["forward_a_token"]
    config = TEXTS["llama"]
    matrices = 2 * (16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 24) + 16 * VOCABULARY
    assert part["forward_a_token"] == 2 * matrices + 2 * 4 * 8 * 16  # 2N, and 4·T·D a layer
    assert part["in_attention"] == 8 * 2 * 4 * 8 * 16
    shared = replace(config, stack=replace(config.stack, layers=4, shared=1))
    assert counts(shared, 8)["flops"]["text"]["in_attention"] == 2 * part["in_attention"]


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize("name", ["learned", "llama", "bucket", "shaw"])
def test_the_cache_is_as_large_as_its_tensors(name):
    model = made(f"text-{name}")
    cache = model.new_cache()
    model(ids(9), cache=cache)
    said = counts(model, length=9, batch=B)["cache_bytes"]
    kept = sum(x.numel() for layer in cache.self_attention for x in (layer.key, layer.value))
    assert (said["float32"], said["bfloat16"], said["tokens"]) == (4 * kept, 2 * kept, 9)


@pytest.mark.ci
def test_the_cache_of_a_source_and_of_a_window():
    for config, source in ((SPEECH, torch.randn(B, 10, 16)), (TEXT_TO_TEXT, torch.randn(B, 12, 16))):
        model = of_config(config).decoder
        model = TextTransformer(model.config).eval()
        cache = model.new_cache()
        model(ids(12), source, cache=cache)
        layers = [*cache.self_attention, *cache.cross_attention]
        kept = sum(4 * x.numel() for layer in layers for x in (layer.key, layer.value))
        assert counts(config, 12, B)["cache_bytes"]["float32"] == kept
    window = TEXTS["window"]
    seen, whole = counts(window, 12)["cache_bytes"], counts(replace(window, window=None), 3)["cache_bytes"]
    assert seen["float32"] == whole["float32"]
    assert counts(VIT)["cache_bytes"] is None


@pytest.mark.ci
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("name", ["text-llama", "text-to-text", "captioner", "clip-sigmoid", "speech-to-text"])
def test_weights_gradients_and_states_are_those_of_a_step(name, optimizer):
    model = made(name).train()
    output = run(model, name, B)
    F.mse_loss(output, torch.zeros_like(output)).backward()
    for parameter in model.parameters():  # those that this loss does not reach are trained by another
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    states = 0
    for made_ in optimizers(model, OptimSettings(optimizer=optimizer)):
        made_.step()
        held = [x for state in made_.state.values() for x in state.values()]
        states += sum(x.numel() * x.element_size() for x in held if isinstance(x, Tensor))
    said = counted(name)["training_bytes"]
    size = {True: 0, False: 0}
    for parameter in model.parameters():
        size[parameter.grad is not None] += 4 * parameter.numel()
    assert said["weights"] == sum(size.values())
    assert said["gradients"] == size[True]
    assert said["optimizer"][optimizer] == states


@pytest.fixture(autouse=True)
def _fused_attention(monkeypatch):
    """Costs assume it; short rows in bfloat16 train with matrix products on a CPU."""
    monkeypatch.setattr(sdpa, "SHORT", 0)


def kept(model: nn.Module, loss: Callable[[], Tensor], half: bool) -> int:
    """Bytes that autograd saves beside the weights, each storage once."""
    own = {x.untyped_storage().data_ptr() for x in [*model.parameters(), *model.buffers()]}
    found: dict[int, torch.UntypedStorage] = {}

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in own:
            found[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            made_ = loss()
        assert made_.requires_grad
    return sum(storage.nbytes() for storage in found.values())


def sized(block: BlockConfig, kind: str = "learned", causal: bool = True, **options) -> TextConfig:
    stack = StackConfig(block, 3, final_norm=not block.post_norm)
    return TextConfig(61, 48, stack, causal, True, positions=PositionConfig(kind), **options)


ATTENTION = AttentionConfig(64, 4)
GATED = BlockConfig(replace(ATTENTION, kv_heads=2, bias=False), 96, "silu", gated=True, norm="rms")
KEPT = {
    "pre-norm": sized(BlockConfig(ATTENTION, 256)),
    "gated": sized(GATED, "rotary"),
    "post-norm": sized(BlockConfig(ATTENTION, 256, "relu", post_norm=True), causal=False),
    "bias by head": sized(BlockConfig(ATTENTION, 128, "relu", norm="rms"), "bucket"),
    "dropout": sized(BlockConfig(ATTENTION, 256, "quick_gelu", dropout=0.1)),
    "bert": sized(BlockConfig(ATTENTION, 256, post_norm=True), causal=False, stem_norm=True, transform=True,
                  embed_width=32, head_bias=True),
    "dropped weights": sized(BlockConfig(replace(ATTENTION, dropout=0.1), 256)),
    "scaled": sized(BlockConfig(ATTENTION, 256, layer_scale=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", spread(KEPT, 2, pytest.mark.slow, pytest.mark.ci))
def test_activations_are_what_autograd_keeps(name):
    model, words = TextTransformer(KEPT[name]).train(), torch.randint(61, (3, 40))
    said = counts(model, 40, 3)["training_bytes"]["activations"]
    for kind in ("float32", "bfloat16"):
        known = kept(
            model, lambda: F.cross_entropy(model(words).flatten(0, 1).float(), words.flatten()), kind[0] == "b"
        )
        assert said[kind] == pytest.approx(known, rel=0.05), kind


@pytest.mark.ci
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", ["vit-token", "vit-map", "captioner", "text-to-text", "speech-to-text", "git",
                                  "conformer-rotary", "conformer-relative", "joint", "coca", "tabular"])  # fmt: skip
def test_activations_of_every_kind(name, half):
    model = made(name).train()

    def loss() -> Tensor:
        output = run(model, name, B)
        parts = output if isinstance(output, tuple) else (output,)
        return sum(part.float().log_softmax(-1).sum() for part in parts if part.is_floating_point())

    known = kept(model, loss, half)
    said = counted(name)["training_bytes"]["activations"]["bfloat16" if half else "float32"]
    assert said == pytest.approx(known, rel=0.15)


def test_every_kind_has_counts():
    assert set(cost_parts.KINDS) == {model_class for model_class, _ in KINDS.values()}


@pytest.mark.ci
def test_checkpointing_keeps_inputs_and_one_block():
    stack = KEPT["pre-norm"].stack
    kinds = [{"layers": 1}, {"layers": 2}, {"layers": 9, "checkpointing": True}]
    made = [replace(KEPT["pre-norm"], stack=replace(stack, final_norm=False, **kind)) for kind in kinds]
    found = [counts(config, 40, 3)["training_bytes"]["activations"] for config in made]
    inputs_ = 9 * 3 * 40 * 64 * 4
    for kind in ("float32", "bfloat16"):
        one, two, saving = (each[kind] for each in found)
        assert saving - one == pytest.approx(inputs_, abs=16 * 64 * 64)
        assert two - one > 10 * inputs_ / 9


@pytest.mark.ci
def test_of_a_paper():
    said = counts(preset("vit_b16"))
    assert said["parameters"]["total"] == 86_567_656
    assert said["flops"]["image"]["forward"] / 2 == pytest.approx(17.56e9, rel=0.002)  # timm: 17.56 GMAC
    whisper = counts(PRESETS["whisper_tiny"], batch=4)["cache_bytes"]
    assert whisper["bfloat16"] == 2 * 2 * 4 * 4 * 384 * (448 + 1500)


@pytest.mark.ci
def test_info_prints_them(capsys, tmp_path, monkeypatch):
    whisper = PRESETS["whisper_tiny"]
    layer = {name: replace(part, stack=replace(part.stack, layers=1)) for name, part in vars(whisper).items()}
    monkeypatch.setitem(PRESETS, "whisper_tiny", replace(whisper, **layer))
    code, out, err = command(capsys, "info", "whisper_tiny", "--format", "json", "--batch", "2", "--length", "100")
    assert (code, err) == (0, "")
    facts = json.loads(out)
    assert facts["kind"] == "speech_to_text"
    assert facts["counts"] == counts(preset("whisper_tiny"), 100, 2)
    code, out, err = command(capsys, "info", "whisper_tiny")
    assert (code, err) == (0, "")
    assert "cache of keys and values: 5.7 MiB in float32, 2.9 MiB in bfloat16 (batch 1, 448 tokens)" in out
    assert "memory to train (batch 1):" in out
    code, out, err = command(capsys, "info", "whisper_tiny", "--length", "449")
    assert (code, out) == (1, "")
    assert err == "multimodal: error: length 449: the context of the model's text is 448\n"
    assert command(capsys, "info", "vit_b99")[0] == 1
    assert command(capsys, "info", "vit_b16", "--length", "0")[0] == 2
    for model, flag in (("vit_b16", "--length"), ("gpt3_125m", "--seconds"), ("whisper_tiny", "--seconds")):
        code, _, err = command(capsys, "info", model, flag, "8")
        assert (code, f"{flag}: does not apply to {model}" in err) == (1, True)
    monkeypatch.chdir(tmp_path)
    save_folder(Checkpoint(made("text-llama")), tmp_path / "vit_b16")
    assert (
        json.loads(command(capsys, "info", "vit_b16", "--format", "json")[1])["kind"] == "text"
    )  # a folder comes first


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(UsageError, match="expected a model's configuration"):
        counts(AttentionConfig(8, 2))
    with pytest.raises(UsageError, match=r"batch must be an integer of at least 1 \(got 0\)"):
        counts(VIT, batch=0)
    for seconds in (0, float("inf"), 1e308):
        with pytest.raises(UsageError, match=r"seconds must be a number in \(0, 86400\]"):
            counts(VIT, seconds=seconds)


@pytest.mark.ci
def test_a_recognizer_whose_chunks_are_drawn_in_training_is_counted():
    model = made("conformer-chunk")
    model.config = replace(model.config, dynamic=True)
    assert counts(model, seconds=SECONDS)["parameters"] == counted("conformer-chunk")["parameters"]
