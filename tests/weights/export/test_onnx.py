"""ONNX exports in onnxruntime beside our models, and the shipped clients, which know no torch."""

import ast
import json
import runpy
import shutil
import subprocess
import sys
import wave
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import multimodal
from multimodal.blocks.stack import StackConfig
from multimodal.errors import UsageError
from multimodal.export import clients
from multimodal.export.client_files import write_client
from multimodal.export.export import export
from multimodal.export.onnx import quantize
from multimodal.export.parts import graphs_of
from multimodal.models.clip import CLIP
from multimodal.models.encoder_decoder import EncoderDecoder
from multimodal.tasks.transcribe.conformer.decode import decode_windows
from multimodal.tasks.transcribe.options import SpeechDecodingOptions
from multimodal.tokens.text.bytepair import BytePairTokenizer
from multimodal.weights.folder import Checkpoint, save_folder
from multimodal.weights.load import load
from tests.helpers.commands import run
from tests.helpers.references.translation import TEXTS, t5
from tests.helpers.tiny import ALL, CLIPS, TEXT_TO_TEXT, made, randomized
from tests.helpers.tiny_checkpoints import BYTES, IDS, RECORD, checkpoint

onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")
SIZES = {"batch": 3, "length": 4, "past": 0, "source": 5, "frames": 18, "total": 4}
UNSUPPORTED = ("text-linear", "transducer", "moonshine", "canary", "git", "coca", "tabular")
QUICK = ("speech-to-text",)  # with a decoder that hears, which no other test in CI writes; all with -m slow
KINDS = [pytest.param(name, marks=pytest.mark.ci if name in QUICK else pytest.mark.slow) for name in ALL
         if name not in UNSUPPORTED and not name.startswith(("any", "conformer-"))]  # fmt: skip


def shallow(config):
    """The same with one layer in each stack, whose graph takes half of the time; that of a language model has two."""
    parts = {f.name: shallow(part) for f in fields(config) if is_dataclass(part := getattr(config, f.name))}
    return replace(config, **parts, **({"layers": 1} if isinstance(config, StackConfig) else {}))


def one_layer(model: nn.Module) -> nn.Module:
    return randomized(type(model)(shallow(model.config)))


def translator() -> Checkpoint:
    tokenizer = BytePairTokenizer.train(["zq zq"] * 3, 264, languages=["en", "de"])
    encoder, decoder = (replace(part, context=40) for part in (TEXT_TO_TEXT.encoder, TEXT_TO_TEXT.decoder))
    decoder = replace(decoder, vocabulary=tokenizer.vocab_size)
    config = shallow(replace(TEXT_TO_TEXT, encoder=encoder, decoder=decoder, start_id=tokenizer.eos_id))
    return Checkpoint(randomized(EncoderDecoder(config), seed=10), tokenizer)  # its text varies


def client_of(folder: Path):
    names = runpy.run_path(str(folder / "client.py"))
    return next(names[name] for name in ("TextClient", "ImageClient") if name in names)(folder)


def program(folder: Path, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(folder / "client.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False, timeout=120)


def test_a_sentencepiece_vocabulary_lies_beside_the_graphs(tmp_path):
    from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

    folder, out = tmp_path / "t5", tmp_path / "out"
    for path in (folder, out):
        path.mkdir()
    sizes = {"d_model": 24, "d_kv": 8, "d_ff": 40, "num_layers": 1, "num_heads": 3, "decoder_start_token_id": 0}
    T5ForConditionalGeneration(T5Config(vocab_size=t5(folder) + 20, **sizes)).save_pretrained(folder)
    checkpoint = load(folder)
    assert "client" not in write_client(checkpoint, out)
    ids = AutoTokenizer.from_pretrained(out)(TEXTS[0]).input_ids
    assert ids == checkpoint.required_tokenizer().batch(TEXTS[:1]).ids[0].tolist()


@pytest.mark.ci
def test_the_clients_are_short_and_import_no_torch():
    for path in Path(clients.__file__).parent.glob("[!_]*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 85
        modules = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
        imported = {(node.module if isinstance(node, ast.ImportFrom) else node.names[0].name) for node in modules}
        assert imported <= {"json", "sys", "wave", "pathlib", "numpy", "onnxruntime", "PIL", "tokenizers"}


@pytest.mark.ci
def test_a_language_model_writes_the_same_text(tmp_path, capsys):
    save_folder(checkpoint("llama"), tmp_path / "model")
    code, _, err = run(capsys, "export", tmp_path / "model", "--to", "onnx", tmp_path / "out")
    assert (code, err) == (0, "")
    written = client_of(tmp_path / "out").complete("ab cab")  # to the end of its context of 32
    assert written == multimodal.generate("ab cab", str(tmp_path / "model"), temperature=0, max_new_tokens=25)
    text = (tmp_path / "out" / "model.onnx").read_bytes()
    assert str(Path(multimodal.__file__).parent).encode() not in text  # the exporter's notes
    with pytest.raises(UsageError, match=r"out: exists; overwrite=True"):
        export(tmp_path / "model", tmp_path / "out")
    with pytest.raises(ValueError, match=r"expected fewer tokens than the context of 32 \(got 61\)"):
        client_of(tmp_path / "out").complete("ab" * 30)


@pytest.mark.ci
def test_a_recognizer_hears_the_same_text(tmp_path):
    source = replace(checkpoint("joint"), model=one_layer(checkpoint("joint").model))
    save_folder(source, tmp_path / "model")
    export(tmp_path / "model", tmp_path / "out")
    samples = (np.random.default_rng(0).normal(size=12000) * 3000).astype(np.int16)
    for name, rate in (("a", 16000), ("other", 8000)):
        with wave.open(str(tmp_path / f"{name}.wav"), "wb") as file:
            file.setparams((1, 2, rate, 0, "NONE", ""))
            file.writeframes(samples.tobytes())
    (heard,) = decode_windows([torch.from_numpy(samples / 32768).float()], source, SpeechDecodingOptions(beam_size=1))
    assert heard.ids
    assert client_of(tmp_path / "out").transcribe(tmp_path / "a.wav") == BYTES.decode(heard.ids).strip()
    with pytest.raises(ValueError, match=r"of 16000 Hz, 1 channel, 16 bits \(got 8000 Hz, 1 channels, 16 bits, 12000"):
        client_of(tmp_path / "out").transcribe(tmp_path / "other.wav")
    ended = program(tmp_path / "out")
    assert (ended.returncode, ended.stderr) == (2, "usage: client.py SOUND.wav\n")
    client = client_of(tmp_path / "out")
    client.own["audio"] |= {"frames": 50, "samples": 8000}  # as Whisper's, which has a window
    with pytest.raises(ValueError, match=r"expected at most 0.5 seconds, the window of the model \(got 0.75\)"):
        client.transcribe(tmp_path / "a.wav")


@pytest.mark.filterwarnings("ignore:text 1 has a translation that was cut")
@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny translator", "translator-mini", "captioner-mini"])
def test_settings_suffice_for_a_model_without_a_client(model, tmp_path):
    """A loop of the client's over another model's graphs, with ids from `export.json` alone."""
    if model == "tiny translator":
        save_folder(translator(), tmp_path / "model")
        model = str(tmp_path / "model")
    record = export(model, tmp_path / "out")
    assert "client" not in record
    place = Path(clients.__file__).parent
    texts, images = (runpy.run_path(str(place / f"{name}.py")) for name in ("texts", "images"))
    client = texts["TextClient"](tmp_path / "out")
    own, prompt = client.own, client.own["prompt"]
    if model == "captioner-mini":
        Image.effect_noise((120, 80), 90).convert("RGB").save(tmp_path / "a.png")
        inputs = {"pixel_values": images["ImageClient"].pixels(client, tmp_path / "a.png")}
        wanted = multimodal.caption(tmp_path / "a.png", model, beam_size=1)[0]["caption"]
    else:
        ids = client.tokens.encode("A dog runs on the beach.", add_special_tokens=False).ids
        ids = np.array([[own["languages"]["en"], *own["before"], *ids, *own["after"]]])
        inputs, prompt = {"input_ids": ids, "attention_mask": np.ones_like(ids)}, [*prompt, own["languages"]["de"]]
        wanted = multimodal.translate("A dog runs on the beach.", model, source="en", target="de", beam_size=1)
    state = client.run("encoder_model.onnx", inputs) | {"encoder_attention_mask": inputs.get("attention_mask")}
    written = client.write(prompt, state).strip().rstrip("\ufffd")  # a text that is cut ends within a letter
    assert written == wanted.rstrip("\ufffd") != ""


def pictures(folder: Path) -> list[str]:
    """Images of each kind: with transparency, of 16 bits, turned by a flag, in colour."""
    Image.effect_noise((50, 31), 90).convert("RGB").save(folder / "a.png")
    samples = np.random.default_rng(0).integers(0, 256, (31, 50, 4), np.uint8)
    Image.fromarray(samples).save(folder / "alpha.png")
    Image.fromarray(samples[..., 0] * np.uint16(257)).save(folder / "deep.png")
    turned = Image.Exif()
    turned[0x112] = 6
    Image.fromarray(samples[..., :3]).save(folder / "turned.png", exif=turned)
    return sorted(map(str, folder.glob("*.png")))


@pytest.mark.ci
def test_a_clip_gives_the_same_classification_and_int8_a_near_one(tmp_path, capsys, monkeypatch):
    config = replace(CLIPS["softmax"], eos_id=BYTES.eos_id)
    config = shallow(replace(config, text=replace(config.text, vocabulary=IDS, context=40)))
    plain, labels, files = Checkpoint(randomized(CLIP(config)), BYTES, RECORD), ["a dog" * 9, "cat"], pictures(tmp_path)
    by_label = replace(plain, card={"templates": {labels[0]: ["{} sits", "{} runs"], "cat ": ["it is a feline"]}})
    save_folder(plain, tmp_path / "model")
    export(tmp_path / "model", tmp_path / "float32")
    shutil.copytree(tmp_path / "float32", tmp_path / "int8")
    for path in (tmp_path / "int8").glob("*.onnx"):
        quantize(path)
        assert path.stat().st_size < (tmp_path / "float32" / path.name).stat().st_size
    copied = lambda _, path: shutil.copyfile(tmp_path / "float32" / path.name, path)  # the same graphs
    monkeypatch.setattr("multimodal.export.onnx.export_graph", copied)
    save_folder(by_label, tmp_path / "model-labelled")
    export(tmp_path / "model-labelled", tmp_path / "labelled")
    for source in (plain, by_label):
        with pytest.warns(UserWarning, match="cut to 40 tokens"):
            found = multimodal.classify(files, labels=labels, model=source)
        expected = [{one["label"]: one["score"] for one in result["scores"]} for result in found]
        for store, far in (("float32", 1e-5), ("int8", 0.1)):
            if source is by_label:
                shutil.copyfile(tmp_path / "labelled" / "export.json", tmp_path / store / "export.json")
            client = client_of(tmp_path / store)
            for path, scores in zip(files, expected, strict=True):
                assert client.classify(path, [f" {label}" for label in labels]) == pytest.approx(scores, abs=far)
            assert "is cut to 40 tokens" in capsys.readouterr().err
        for wrong in (["cat", ""], ["cat", "cat "]):
            with pytest.raises(ValueError, match="expected labels that differ, none of them empty"):
                client.classify(files[0], wrong)
    with pytest.raises(ValueError, match=r"expected labels among .*, cat \(got 'cow'\)"):
        client.classify(files[0], ["cow"])
    whole = (tmp_path / "a.png").read_bytes()
    (tmp_path / "short.png").write_bytes(whole[: len(whole) // 2])
    wrong = ((2, [], "usage: client.py IMAGE LABEL"), (2, [files[0]], "usage"), (1, ["no.png", "cat"], "No such file"),
             (1, ["short.png", "cat"], "truncated"))  # fmt: skip
    for code, arguments, says in wrong:
        ended = program(tmp_path / "float32", *arguments, cwd=tmp_path)
        assert (ended.returncode, ended.stderr.count("\n")) == (code, 1)
        assert says in ended.stderr


@pytest.mark.ci
def test_a_failed_export_leaves_nothing(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    save_folder(checkpoint("vit"), tmp_path / "model")
    monkeypatch.setattr("multimodal.export.onnx.export_graph", full)
    with pytest.raises(OSError, match="out"):
        export(tmp_path / "model", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").touch()
    with pytest.raises(UsageError, match=r"holds mine.txt"):
        export(tmp_path / "model", tmp_path / "out", overwrite=True)
    shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize("name", KINDS)
def test_graphs_compute_what_their_modules_do_at_other_sizes(name, tmp_path):
    source = Checkpoint(one_layer(made(name)) if name in QUICK else made(name), source=name)
    record = {"graphs": [graph.name for graph in graphs_of(source)]}
    save_folder(source, tmp_path / "model")
    export(tmp_path / "model", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "export.json").read_text())["graphs"].keys() == {
        f"{graph}.onnx" for graph in record["graphs"]}  # fmt: skip
    for graph in graphs_of(source):
        session = onnxruntime.InferenceSession(tmp_path / "out" / f"{graph.name}.onnx")
        inputs = {key: example(graph, key) for key in graph.inputs}
        with torch.no_grad():
            wanted = graph.module(*inputs.values())
        found = session.run(None, {one.name: inputs[one.name].numpy() for one in session.get_inputs()})
        for one, other in zip(found, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
            assert np.allclose(one, other.numpy(), atol=1e-4)


def example(graph, key: str) -> torch.Tensor:
    torch.manual_seed(0)
    own, axes = graph.inputs[key], graph.axes.get(key, {})
    shape = [SIZES[axes[i]] if i in axes else size for i, size in enumerate(own.shape)]
    if own.is_floating_point():
        return torch.randn(shape)
    if key == "lengths":
        return torch.tensor([18, 11, 7])
    if key == "token_type_ids":
        return torch.randint(0, 2, shape)
    return torch.ones(shape, dtype=torch.long) if "mask" in key else torch.randint(2, 20, shape)
