"""large-v3-turbo and distil-Whisper, small: 128 bands, the vocabulary of large-v3, fewer layers in the decoder; from a
Hugging Face folder to a transcript, as openai-whisper with the same weights."""

import json

import pytest
import torch
from safetensors.torch import save_file

from multimodal.tasks.transcribe.transcribe import transcribe
from multimodal.weights.load import load
from multimodal.weights.speech.whisper import WHISPER_HF, WHISPER_OPENAI
from tests.helpers.tiny_whisper import COMMON, DIMS, THEIR_WARNINGS, sound

pytestmark = THEIR_WARNINGS
OWN = {"n_mels": 128, "n_vocab": 51866, "n_audio_layer": 2, "n_text_layer": 1}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """openai-whisper's model, and the folder with its weights."""
    from whisper.model import ModelDimensions, Whisper

    dims, folder = DIMS | OWN, tmp_path_factory.mktemp("turbo")
    torch.manual_seed(4)
    theirs = Whisper(ModelDimensions(**dims)).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (1.5 if "embed" in name else 0.4))
        theirs.decoder.blocks[0].cross_attn.out.weight *= 3
        words = theirs.decoder.token_embedding.weight
        words[torch.arange(51866) % 500 != 257] *= 0.3
        words[50365::10] *= 1.8
    model = WHISPER_OPENAI.load(dict(theirs.state_dict()), {"dims": dims}, "tiny").model
    tensors = WHISPER_HF.export(model)
    del tensors["proj_out.weight"]
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "whisper", "d_model": 16, "vocab_size": 51866, "num_mel_bins": 128, "encoder_layers": 2,
        "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_layers": 1, "decoder_attention_heads": 2,
        "decoder_ffn_dim": 64, "max_source_positions": 1500, "max_target_positions": 40,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"alignment_heads": [[0, 1]]}))
    heads = torch.zeros(1, 2, dtype=torch.bool)
    heads[0, 1] = True
    theirs.register_buffer("alignment_heads", heads.to_sparse(), persistent=False)
    return theirs, folder


@pytest.mark.ci
def test_sequential_words_equal_openai_whispers(both, monkeypatch):
    import whisper.timing
    from whisper.transcribe import transcribe as their_transcribe

    for name in ("backtrace", "dtw_cpu"):  # without numba's compiler (seconds)
        monkeypatch.setattr(whisper.timing, name, getattr(whisper.timing, name).py_func)

    theirs, folder = both
    wave, options = sound(32), COMMON | {"suppress_tokens": [-1, *range(50259, 50359)], "word_timestamps": True}
    ours = transcribe(wave, load(folder), compute_type="float32", remove_repetitions=False,
                      language_detection_segments=1, **options)  # fmt: skip
    expected = their_transcribe(theirs, wave.numpy(), fp16=False, **options)
    assert [s["tokens"] for s in ours["segments"]] == [s["tokens"] for s in expected["segments"]]
    times = [
        [(w["word"], w["start"], w["end"]) for s in one["segments"] for w in s["words"]] for one in (ours, expected)
    ]
    assert [word for word, *_ in times[0]] == [word for word, *_ in times[1]]
    flat = [torch.tensor([at for _, *own in one for at in own], dtype=torch.float64) for one in times]
    assert torch.allclose(*flat, atol=0.021, rtol=0)
    assert times[0]


@pytest.mark.ci
def test_batched_does_not_depend_on_the_batch(both):
    checkpoint, found = load(both[1]), []
    # with AVX2 alone oneDNN rounds a row of floats by the number of rows beside it
    kind = "int8" if torch.backends.cpu.get_cpu_capability() == "AVX2" else "float32"
    for size in (1, 4):
        found.append(transcribe(sound(70), checkpoint, batched=True, batch_size=size, compute_type=kind, **COMMON))
    assert found[0] == found[1]
    assert found[0]["segments"]
