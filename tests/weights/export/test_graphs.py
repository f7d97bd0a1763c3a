"""Graph modules beside the models: rows padded on the left, tokens one by one, whatever the model's kind."""

import runpy
import wave
from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from multimodal.errors import UsageError
from multimodal.export import clients
from multimodal.export.client_files import write_client
from multimodal.export.parts import graphs_of
from multimodal.models.conformer import ConformerEncoder
from multimodal.models.encoder_decoder import EncoderDecoder
from multimodal.models.text import TextTransformer
from multimodal.tasks.text.embed import text_rows
from multimodal.tokens.image.preprocessing import preprocess
from multimodal.tokens.image.reading import read_image
from multimodal.tokens.text.hub.files import hub_tokenizer
from multimodal.tokens.text.hub.recognizers import LetterTokenizer
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import families, load
from tests.helpers import tiny_checkpoints
from tests.helpers.references import encoders, speech
from tests.helpers.references.hub import hub_folder
from tests.helpers.spread import thin
from tests.helpers.tiny import ALL, ENCODER, TEXTS, conformer, made, randomized

DECODERS = [name for name in ALL if name.startswith("text-") and name not in (
    "text-linear", "text-encoder", "text-detector")] + ["speech-to-text", "captioner", "captioner-bert"]  # fmt: skip
REFUSED = {"text-linear": "linear attention", "transducer": "got transducer", "moonshine": "got Moonshine",
           "git": "got GIT", "any": "got model of several inputs", "tabular": "got model of tables"}  # fmt: skip
IDS = torch.tensor([[0, 0, 5, 7, 9, 3, 2], [4, 1, 8, 2, 6, 11, 7]])  # the first row has two places of padding
VALID = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])


def source_of(model, name: str) -> torch.Tensor:
    torch.manual_seed(0)
    if isinstance(model, EncoderDecoder):
        return torch.tensor([[3, 5, 6, 0], [9, 8, 7, 6]])
    return torch.randn(2, 8, 14) if name == "speech-to-text" else torch.randn(2, 3, 8, 12)


@torch.no_grad()
@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_writes_padded_rows_as_the_model_writes_each_alone(name):
    model = made(name)
    *encoder, graph = graphs_of(Checkpoint(model, source=name))
    names, decoder = list(graph.inputs), getattr(model, "decoder", model)
    source, source_valid, crossed, states = None, torch.tensor([[1, 1, 1, 0], [1] * 4]), [], None
    if encoder:
        source = source_of(model, name)
        masked = "encoder_attention_mask" in names
        states, *crossed = encoder[0].module(source, *([source_valid] if masked else []))
        crossed = [*([source_valid] if masked else []), *crossed]
    own = [x[:, :, :0] for key, x in graph.inputs.items() if key.startswith("past") and ".encoder." not in key]
    rest = crossed[:1] if "encoder_attention_mask" in names else []
    crossed = crossed[len(rest) :]
    first, *own = graph.module(IDS[:, :4], VALID[:, :4], *rest, *own, *crossed)
    found = [first]
    for end in range(5, 8):
        logits, *own = graph.module(IDS[:, end - 1 : end], VALID[:, :end], *rest, *own, *crossed)
        found.append(logits)
    found = torch.cat(found, 1)
    for row, start in enumerate((2, 0)):
        valid = source_valid[row : row + 1].bool() if rest else None
        wanted = decoder(IDS[row : row + 1, start:], None if states is None else states[row : row + 1], valid)
        assert torch.allclose(found[row, start:], wanted[0], atol=1e-5)
    assert found.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize(("name", "blank"), [("wav2vec2", 0), ("hubert large", 3)])
def test_a_recognizer_has_the_columns_of_transformers_and_they_are_named(name, blank, tmp_path):
    reference, letters = speech.case(name), [*"|abcdefg"]
    own = families()[reference.family].load(reference.tensors, reference.config, "file")
    source = Checkpoint(own.model, LetterTokenizer(letters, "|", [], None, clean=blank == 3), source=name)
    (graph,) = graphs_of(source)
    assert list(graph.inputs) == ["input_values", "lengths"]
    samples = torch.randn(1, 4000)
    logits, _ = graph.module(samples, torch.tensor([4000]))
    assert torch.allclose(logits, reference.model(samples).logits, atol=1e-5)
    named = [*letters[:blank], "<pad>", *letters[blank:]]
    settings = {"blank": blank, "vocabulary": named, "clean_up_tokenization_spaces": blank == 3}
    assert write_client(source, tmp_path) == settings


@torch.no_grad()
@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("name", ["BERT", "BERT, masked", "BERT, classes", "BERT, encoder", "BERT, tags",
                                  "RoBERTa, answers", "RoBERTa, encoder", "ELECTRA, discriminator"])  # fmt: skip
def test_an_encoder_has_the_inputs_and_outputs_of_transformers(name):
    reference = encoders.case(name)
    own = families()[reference.family].load(reference.tensors, reference.config, "file")
    (graph,) = graphs_of(Checkpoint(own.model, source=name))
    inputs = {"input_ids": torch.randint(4, 40, (2, 7)), "attention_mask": VALID.flip(1)}
    inputs |= {"token_type_ids": torch.randint(2, (2, 7))} if reference.segments else {}
    assert list(graph.inputs) == list(inputs)
    wanted = reference.reference(**inputs, output_hidden_states=True)
    wanted = {"last_hidden_state": wanted.hidden_states[-1]} | {
        key: value for key, value in wanted.items() if isinstance(value, torch.Tensor)}  # fmt: skip
    found = dict(zip(graph.outputs, graph.module(*inputs.values()), strict=True))
    assert found.keys() == wanted.keys()
    for key, value in found.items():
        kept = inputs["attention_mask"].bool() if 1 in graph.axes[key] else ...
        assert torch.allclose(value[kept], wanted[key][kept], atol=1e-5), key


@torch.no_grad()
@pytest.mark.parametrize("normalize", [True, False])
def test_vectors_of_texts_have_the_length_of_the_card(normalize):
    (graph,) = graphs_of(Checkpoint(made("text-encoder"), card={"pooling": "mean", "normalize": normalize}))
    vectors = dict(zip(graph.outputs, graph.module(IDS, VALID.flip(1)), strict=True))["sentence_embedding"]
    assert torch.allclose(vectors.norm(dim=-1), torch.ones(2)) is normalize


@torch.no_grad()
def test_a_decoder_of_vectors_sees_its_window_and_without_a_head_has_states():
    model = randomized(TextTransformer(replace(TEXTS["llama"], window=3, tied=None)))
    for card in ({"pooling": "last"}, {}):
        (graph,) = graphs_of(Checkpoint(model, card=card))
        assert graph.outputs == ("last_hidden_state", *["sentence_embedding"] * bool(card))
        states = graph.module(IDS, VALID.flip(1))[0]
        assert torch.allclose(states[1], model.states(IDS[1:])[0], atol=1e-5)
        assert torch.allclose(states[0, :5], model.states(IDS[:1, :5])[0], atol=1e-5)


@pytest.mark.parametrize(("puts_end", "card"), [(False, {}), (False, {"pooling": "last"}), (True, {"pooling": "last"})])
def test_the_ids_after_a_text_are_those_of_embed(puts_end, card, tmp_path):
    source = replace(tiny_checkpoints.checkpoint("llama"), card=card)
    tokenizer = copy(source.required_tokenizer())
    tokenizer.puts_end = puts_end
    settings = write_client(replace(source, tokenizer=tokenizer), tmp_path)
    (row,) = text_rows(tokenizer, ["ab"], 32, ends=False)
    assert [*settings["before"], *tokenizer.encode("ab"), *settings["after"]] == row


@pytest.mark.parametrize("name", ["byte-level", "wordpiece"])
def test_a_pair_of_texts_is_made_of_the_settings(name, tmp_path):
    tokenizer = hub_tokenizer(*hub_folder(tmp_path, name))
    model = TextTransformer(replace(ENCODER, vocabulary=tokenizer.vocab_size))
    own = write_client(Checkpoint(model, tokenizer), tmp_path)
    first, second = (tokenizer.encode(text) for text in ("The cat", "a dog"))
    row = [*own["before"], *first, *own["between"], *second, *own["after"]]
    segments = [0] * (len(row) - len(second) - len(own["after"]))
    segments += [own["second_segment"]] * (len(row) - len(segments))
    assert tokenizer.pair("The cat", "a dog") == (row, segments)


def test_whispers_client_writes_as_many_tokens_as_transcribe(tmp_path):
    made, most = load("whisper-mini"), []
    kind = runpy.run_path(str(Path(clients.__file__).with_name("texts.py")))["TextClient"]
    client = object.__new__(kind)
    client.own, client.run = write_client(made, tmp_path), lambda graph, inputs: {}
    client.filters, client.write = np.load(tmp_path / "mel.npy"), lambda *given: most.append(given[2]) or ""
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(bytes(3200))
    client.transcribe(tmp_path / "a.wav")
    assert most == [made.model.config.decoder.context // 2]


@pytest.mark.parametrize(
    ("search", "client"), [({}, "client.py"), ({"repetition_penalty": 1.5}, None), ({"suppress_tokens": [3]}, None)]
)
def test_a_search_that_the_client_lacks_leaves_it_out(search, client, tmp_path):
    source = replace(tiny_checkpoints.checkpoint("llama"), card={"generation": search})
    assert write_client(source, tmp_path).get("client") == client
    assert (tmp_path / "client.py").exists() is (client is not None)


@pytest.mark.parametrize("offset", ["round", "floor"])
def test_the_image_client_prepares_images_as_the_model_does(offset, tmp_path):
    """`floor`: crops of transformers' processors."""
    source = tiny_checkpoints.checkpoint("vit")
    record = replace(source.preprocessing, size=(8, 8), resize="shortest", crop=0.72, offset=offset)
    labels = [str(number) for number in range(source.model.config.classes)]
    kind = runpy.run_path(str(Path(clients.__file__).with_name("images.py")))["ImageClient"]
    client = object.__new__(kind)
    client.own = write_client(replace(source, preprocessing=record, card={"labels": labels}), tmp_path)
    assert client.own["client"] == "client.py"
    samples = np.random.default_rng(0).integers(0, 256, (31, 50, 3), np.uint8)
    deep = samples[..., 0].astype(np.float32)
    for number, image in enumerate((samples, samples.swapaxes(0, 1).copy(), deep / 255, deep, deep * 257)):
        path = tmp_path / f"{number}.tif"
        Image.fromarray(image).save(path)
        assert np.allclose(client.pixels(path)[0], preprocess(read_image(path), record).numpy(), atol=1e-6), number


@pytest.mark.parametrize("change", [{"near": (2, 1)}, {"chunk": 4, "left": 2}])
def test_padding_has_a_frame_to_see_in_a_graph(change, monkeypatch):
    """Without one its softmax is NaN there, also in the frames beside it."""
    causal = {"block": replace(conformer(2).block, conv_causal=True)} if "chunk" in change else {}
    encoder = ConformerEncoder(replace(conformer(2), **causal, **change))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    mask = encoder._masks(torch.tensor([40, 3]), 40)[1]
    assert mask.any(-1).all()
    assert not mask[1, 0, :3, 3:].any()


@pytest.mark.parametrize(("name", "cause"), REFUSED.items())
def test_what_a_graph_does_not_hold_is_named(name, cause):
    with pytest.raises(UsageError, match=cause):
        graphs_of(Checkpoint(made(name), source=name))
