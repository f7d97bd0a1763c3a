"""Models prepared for inference belong to whoever prepared them, and no cache stands between weights and results."""

import copy
import functools
import gc
import importlib
import inspect
import pkgutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from PIL import Image
from torch import Tensor, nn
from torch.nn.utils import prune

import multimodal
from multimodal import caption, classify, generate, transcribe
from multimodal.blocks.capture import capture_attention
from multimodal.data.datasets.image_sets import open_images
from multimodal.decoding.sampling import greedy
from multimodal.errors import UsageError
from multimodal.inference import cuda_graphs
from multimodal.inference.modules import Frozen
from multimodal.inference.prepare import prepare_for_inference
from multimodal.models.text import TextTransformer
from multimodal.models.vit import ViT
from multimodal.system.assets import asset
from multimodal.tasks.classify.classifier import ZeroShotClassifier
from multimodal.tasks.classify.classifier_file import load_classifier, save_classifier
from multimodal.tasks.encode.features import image_features, model_digest
from multimodal.tasks.encode.native import native_features
from multimodal.tasks.retrieve.build import build
from multimodal.tasks.retrieve.index import model_for, open_index, query_vectors
from multimodal.tasks.text.embed import embed
from multimodal.tokens.image.preprocessing import OPENAI_MEAN, OPENAI_STD, Preprocessing
from multimodal.weights.folder import Checkpoint, save_folder
from multimodal.weights.load import load
from tests.helpers import tiny
from tests.helpers.byte_models import byte_model
from tests.helpers.data.captions import written
from tests.helpers.data.letters import Letters
from tests.helpers.spread import spread
from tests.helpers.tiny_whisper import sound, tiny_hybrid

LABELS = ["a dog", "a cat", "a bird"]
SIGHT = Preprocessing((8, 12), "squash", "bicubic", OPENAI_MEAN, OPENAI_STD, 0, 1.0)


def image(seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (40, 60, 3), np.uint8))


KINDS: dict[str, Callable[[], Checkpoint]] = {
    "clip": lambda: Checkpoint(tiny.made("clip-softmax"), Letters(), SIGHT, "tiny", {"templates": "none"}),
    "captioner": lambda: written(end=2.0),
    "recognizer": tiny_hybrid.__wrapped__,  # which keeps what it made
    "whisper": lambda: load("whisper-mini"),
    "writer": byte_model,
}
first = functools.cache(lambda name: KINDS[name]())


def made_as(name: str) -> Checkpoint:
    given = first(name)
    return replace(given, model=copy.deepcopy(given.model))


CALLS: dict[str, tuple[str, Callable[[Checkpoint, str], Any]]] = {
    "classify": ("clip", lambda given, kind: classify(image(), LABELS, model=given, compute_type=kind)),
    "caption": ("captioner", lambda given, kind: caption(image(), given, min_tokens=3, compute_type=kind)),
    "transcribe": ("recognizer", lambda given, kind: transcribe(sound(1), given, vad_filter=False, compute_type=kind,
                                                                no_speech_threshold=None)),
    "transcribe by Whisper": ("whisper", lambda given, kind: transcribe(asset("sample", "speech.flac"), given,
        compute_type=kind, sample_len=9, temperature=0.0, language="en", no_speech_threshold=None)),
    "generate": ("writer", lambda given, kind: generate("ab", given, max_new_tokens=8, compute_type=kind)),
    "embed": ("writer", lambda given, kind: embed(["ab", "cd"], given)),
    "embed by a CLIP": ("clip", lambda given, kind: embed(["ab", "cd"], given)),
    "native": ("clip", lambda given, kind: native_features(given.model, [image()], SIGHT, 12)),
}  # fmt: skip


def blocks_zeroed(model: nn.Module) -> None:
    """But for the first number of each tensor, which a look at it would see."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data[1:].zero_()


def copied_into(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.flip(0))


def optimized(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) * torch.linspace(-1, 1, parameter.numel()).view_as(parameter)
    optimizer.step()


def loaded(model: nn.Module) -> None:
    model.load_state_dict({name: tensor.flip(0) if tensor.ndim else tensor
                           for name, tensor in model.state_dict().items()})  # fmt: skip


def replaced(model: nn.Module) -> None:
    for part in model.modules():
        for name, parameter in part.named_parameters(recurse=False):
            setattr(part, name, nn.Parameter(parameter.detach().flip(0)))


EDITS = [blocks_zeroed, copied_into, optimized, loaded, replaced]


def plain(result: Any) -> Any:
    return result.tolist() if isinstance(result, Tensor) else result


def types_of(call: str) -> list[str]:
    if CALLS[call][0] in ("writer", "captioner", "recognizer", "whisper") and not call.startswith("embed"):
        return ["auto", "bfloat16", "int8"]
    return ["auto"] if call.startswith(("embed", "native")) else ["auto", "bfloat16"]


def changes() -> list[Any]:
    """Calls with number formats and edits; all edits by all calls, and Whisper's other formats, with `-m slow`."""
    cases = []
    for number, call in enumerate(CALLS):
        for kind in types_of(call):
            several = kind == "auto" and CALLS[call][0] != "whisper"
            edits = [EDITS[0], EDITS[1 + number % 4]] if several else EDITS[:1]
            whisper = CALLS[call][0] == "whisper" and kind != "auto"  # seconds
            cases.append(pytest.param(call, kind, edits, marks=pytest.mark.slow if whisper else pytest.mark.ci))
            if several:
                cases.append(pytest.param(call, kind, EDITS, marks=pytest.mark.slow))
    return cases


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("call", "kind", "edits"), changes())
def test_a_call_sees_every_change_of_the_weights(call: str, kind: str, edits: list[Callable]):
    """However they are changed, as a fresh copy of the same weights has it."""
    name, run = CALLS[call]
    seen = set()
    for edit in edits:
        given = made_as(name)
        before = plain(run(given, kind))
        edit(given.model)
        after = plain(run(given, kind))
        assert after == plain(run(replace(given, model=copy.deepcopy(given.model)), kind)), edit.__name__
        seen.add(before != after)
    assert True in seen


SEVERAL = ["clip-softmax", "vit-layer-scale", "speech-to-text", "joint", "captioner", "coca", "text-llama",
           "text-encoder", "text-to-text"]  # fmt: skip
ALL_KINDS = [(name, kind) for name in SEVERAL for kind in ("auto", "bfloat16", "int8")]


@pytest.mark.parametrize(("name", "kind"), spread(ALL_KINDS, 2, pytest.mark.slow, pytest.mark.ci))
@torch.no_grad()
def test_a_prepared_model_owns_its_weights(name: str, kind: str):
    original = tiny.made(name)
    if kind == "int8" and name.startswith(("clip", "vit", "text-encoder")):
        pytest.skip("needs the compiled library")
    made = prepare_for_inference(Checkpoint(original, source="tiny"), kind)
    assert not any(parameter.requires_grad for parameter in made.model.parameters())
    before = [run_once(made.model) for _ in range(2)]
    for tensor in [*original.parameters(), *original.buffers()]:
        tensor.data.fill_(3)
    fresh_model = prepare_for_inference(Checkpoint(tiny.made(name), source="tiny"), kind).model
    for model in (made.model, fresh_model):
        assert [run_once(model) for _ in range(2)] == before


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SEVERAL)
@torch.no_grad()
def test_a_prepared_model_calls_all_hooks_and_has_pruned_weights(name: str, kind: str):
    model, calls = tiny.made(name).eval(), []
    for part in model.modules():
        part.register_forward_hook(lambda part, _, output: calls.append(type(part).__name__))
    for part in [part for part in model.modules() if isinstance(part, nn.Linear)]:
        prune.l1_unstructured(part, "weight", 0.3)
    run_once(model)
    right = calls.copy()
    given = Checkpoint(model, source="tiny")
    made = prepare_for_inference(given, kind).model
    calls.clear()
    found = run_once(made)
    assert calls == right
    assert found == run_once(model) or kind == "bfloat16"
    with pytest.raises(UsageError, match="int8' replaces modules, which have forward hooks"):
        prepare_for_inference(given, "int8")


class Added(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.mean(-1, keepdim=True)


@pytest.mark.parametrize("adapter", ["peft", "subclass"])
@torch.no_grad()
def test_a_prepared_model_keeps_adapters(adapter: str):
    model = tiny.made("text-llama").eval()
    plain, inner = run_once(model), [f"stack.blocks.{i}.attention.{name}" for i in (0, 1) for name in ("query", "key")]
    if adapter == "peft":
        inject_adapter_in_model(LoraConfig(r=2, target_modules=inner, init_lora_weights=False), model)
    else:
        for name in inner:
            model.get_submodule(name).__class__ = Added
    made = prepare_for_inference(Checkpoint(model, source="tiny"), "float32").model
    assert run_once(made) == run_once(model) != plain


def run_once(model: nn.Module) -> list[Any]:
    """All outputs of one forward pass, for one row."""
    torch.manual_seed(0)
    pixels, ids, mel = torch.randn(1, 3, 8, 12), torch.tensor([[1, 2, 3]]), torch.randn(1, 24, 8)
    match type(model).__name__:
        case "CLIP":
            ids[0, 2] = tiny.VOCABULARY - 1  # the end
            found = model(pixels, ids, torch.ones(1, 3, dtype=torch.bool))
        case "ViT" | "PreparedViT":
            found = model(pixels)
        case "Whisper":
            found = model.decoder(ids, model.encoder(mel[:, :20].transpose(1, 2)))
        case "ConformerCTC":
            found = model(mel, torch.tensor([24]), ids)
        case "TextTransformer":
            found = model(ids)
        case "EncoderDecoder":
            found = model(ids, ids)
        case _:
            step, cache = model.decoding(model.encode(pixels))
            found = greedy(step, ids[:, :1], cache, eos=-1, max_new=3).logprobs
    parts = found if isinstance(found, tuple | list) else [found]
    return [part.tolist() if isinstance(part, Tensor) else part for part in parts]


def test_who_converts_owns_what_he_gets():
    given = made_as("clip")
    made = prepare_for_inference(given, "float32")
    assert made.prepared == ("float32", torch.device("cpu"))
    assert given.prepared is None
    assert prepare_for_inference(given, "float32").model is not made.model
    assert prepare_for_inference(made).model is prepare_for_inference(made, "float32", "cpu").model is made.model
    message = "compute_type 'bfloat16' on cpu: the model already computes in float32 on cpu"
    with pytest.raises(UsageError, match=message):
        prepare_for_inference(made, "bfloat16")
    with pytest.raises(UsageError, match="prepared for inference; pass the Checkpoint"):
        prepare_for_inference(Checkpoint(made.model))
    right = classify(image(), LABELS, model=given, compute_type="float32")
    assert classify(image(), LABELS, model=made) == right


@pytest.mark.ci
def test_a_prepared_model_is_converted_no_second_time(monkeypatch: pytest.MonkeyPatch):
    calls = {"clip": "classify", "captioner": "caption", "recognizer": "transcribe", "writer": "generate"}
    made = {name: prepare_for_inference(made_as(name)) for name in calls}
    monkeypatch.setattr("multimodal.inference.prepare._convert", None)
    for name, call in calls.items():
        assert CALLS[call][1](made[name], "auto")


@pytest.mark.parametrize("kind", ["float32", "int8", "bfloat16"])
def test_what_pytorch_would_do_to_half_of_a_prepared_model_is_refused(kind: str, tmp_path: Path):
    original = tiny.made("text-llama")
    made = prepare_for_inference(Checkpoint(original, source="tiny"), kind)
    assert any(isinstance(part, Frozen) for part in made.model.modules())
    for act in (
        lambda: made.model.to(torch.float64), made.model.half, made.model.state_dict,
        lambda: made.model.load_state_dict(original.state_dict(), strict=False), lambda: copy.deepcopy(made.model),
        lambda: torch.save(made.model, tmp_path / "model.pt"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match="frozen"):
            act()
    with pytest.raises(UsageError, match="expected a model as loaded, got one prepared for inference"):
        save_folder(made, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_classifier_file_is_of_the_weights_as_they_are_now(tmp_path: Path):
    given, path = made_as("clip"), tmp_path / "classifier.safetensors"
    digest, made = model_digest(given), prepare_for_inference(given)
    save_classifier(ZeroShotClassifier(made, LABELS), path, digest)
    right = classify(image(), LABELS, model=given)
    assert classify(image(), model=given, classifier=path) == right
    assert load_classifier(path, made, digest).results([image()]) == right
    with pytest.raises(UsageError, match="one prepared for inference"):
        classify(image(), model=made, classifier=path)
    blocks_zeroed(given.model)
    with pytest.raises(UsageError, match="has other weights"):
        classify(image(), model=given, classifier=path)


def test_an_index_is_of_the_weights_as_they_are_now(tmp_path: Path):
    given, file = made_as("clip"), tmp_path / "image.png"
    image().save(file)
    build([file], given, tmp_path / "index")
    index = open_index(tmp_path / "index")
    assert index.search(query_vectors(prepare_for_inference(model_for(index, given)), images=[file]))[0] > 0.999
    blocks_zeroed(given.model)
    with pytest.raises(UsageError, match="other weights"):
        model_for(index, given)
    with pytest.raises(UsageError, match="was built with"):
        build([file], given, tmp_path / "index")
    build([file], given, tmp_path / "index", overwrite=True)
    index = open_index(tmp_path / "index")
    assert index.search(query_vectors(model_for(index, given), images=[file]))[0] > 0.999


def test_cached_features_are_of_all_the_weights(tmp_path: Path):
    """A prepared model's maps are no tensors that PyTorch lists, so its name must come from the original."""
    (tmp_path / "images").mkdir()
    image().save(tmp_path / "images" / "a.png")
    several, given = open_images(tmp_path / "images"), made_as("clip")

    def found() -> Tensor:
        made, digest = prepare_for_inference(given), model_digest(given)
        return image_features(made, several, cache=tmp_path / "cache", digest=digest).vectors

    before = found()
    assert torch.equal(found(), before)
    with torch.no_grad():
        given.model.image.stack.blocks[0].feed.up.weight.mul_(-1)  # a linear map alone
    assert not torch.equal(found(), before)
    with pytest.raises(UsageError, match="one prepared for inference"):
        image_features(prepare_for_inference(given), several, cache=tmp_path / "cache")


def test_positions_are_kept_by_a_prepared_model_alone():
    model = tiny.randomized(ViT(tiny.VITS["token"]))
    made = prepare_for_inference(Checkpoint(model, source="tiny")).model
    with torch.inference_mode():
        first = made.grid_positions((4, 5))
        assert made.grid_positions((4, 5)) is first
    assert torch.equal(made.grid_positions((4, 5)), model.grid_positions((4, 5)))
    model.positions.data[1:].mul_(2)
    assert not torch.equal(model.grid_positions((4, 5)), first)
    assert made.grid_positions((4, 5)) is first
    assert model.grid_positions((4, 5)).requires_grad


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")
def test_nothing_keeps_a_model_or_its_tokenizer(tmp_path: Path):
    """Neither a plain nor a prepared one, after all that is done with them."""
    lm = tiny.randomized(TextTransformer(replace(tiny.text(tied=True), vocabulary=tiny_hybrid().tokenizer.vocab_size)))
    save_folder(Checkpoint(lm, tiny_hybrid().tokenizer), tmp_path / "lm")
    alive = []
    for name, run in CALLS.values():
        given = KINDS[name]()
        made = prepare_for_inference(given)
        run(given, "auto")
        run(made, "auto")
        if name == "recognizer":
            transcribe(sound(1), made, vad_filter=False, lm=tmp_path / "lm", lm_bonus=0.1, beam_size=2)
        alive += map(weakref.ref, (given.model, made.model, given.tokenizer))
    lm = cuda_graphs.GraphDecoder(lm)
    step, cache = cuda_graphs.static_step(lm, None, None, 8, last=1)
    greedy(step, torch.tensor([[1, 2]]), cache, eos=-1, max_new=3)
    with capture_attention() as seen:
        lm(torch.tensor([[1, 2]]))
    alive.append(weakref.ref(lm))
    del given, made, lm, step, cache, seen
    gc.collect()
    assert [one() for one in alive if one() is not None] == []


def test_caches_of_functions_know_plain_values_alone():
    """Not models, tokenizers or checkpoints, which change and which the cache would keep."""
    wrapper, found = type(functools.cache(len)), set()
    for info in pkgutil.walk_packages(multimodal.__path__, "multimodal."):
        if info.name.endswith("__main__"):
            continue
        for value in vars(importlib.import_module(info.name)).values():
            if isinstance(value, wrapper) and value.__module__.startswith("multimodal."):
                found.add(value)
    assert found
    for function in found:
        kinds = {str(one.annotation) for one in inspect.signature(function.__wrapped__).parameters.values()}
        plain_kinds = {str(kind) for kind in (int, float, str, bool, type, Path, torch.device)}
        strange = {kind for kind in kinds - plain_kinds if not kind.startswith("typing.Literal[")}
        assert not strange, f"{function.__module__}.{function.__name__}"
