"""The GPU's part of `transcribe.py`: log-mel, encoder, one stream with CUDA graphs and without, and batches, beside
peers in the same run."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transcribe
import transcribe_peers

from multimodal import graphs, search
from multimodal.blocks.cache import Cache
from multimodal.tokens.mel import log_mel
from multimodal.weights.compute import for_inference

TOKENS = 64
BATCH = 32


def measure(rounds: int) -> dict[str, Any]:
    if not torch.cuda.is_available():
        print("no GPU: nothing was measured")
        return {}
    name = torch.cuda.get_device_name()
    with torch.inference_mode():
        found = {f"{name}, log-mel of 10 minutes": _mel(rounds)}
        return (
            found
            | {f"{name}, {size}": _of_size(size, rounds) for size in ("tiny", "base")}
            | {f"{name}, large-v3-turbo, {BATCH} windows": _batched("large-v3-turbo", rounds)}
        )


def _mel(rounds: int) -> dict[str, Any]:
    import whisper

    wave = torch.randn(600 * 16000, generator=torch.Generator().manual_seed(0)).to("cuda") * 0.1
    ours, theirs = partial(log_mel, wave), partial(whisper.log_mel_spectrogram, wave)
    found = transcribe.compare({"ours": _waited(ours)}, {"openai-whisper": _waited(theirs)}, rounds)
    return found | {"largest difference from openai-whisper": (ours() - theirs()).abs().max().item()}


def _of_size(size: str, rounds: int) -> dict[str, Any]:
    encode, decode = _runs(size, 1)
    found = transcribe.compare(*decode, rounds)
    per_token = {name: round(value / TOKENS, 4) for name, value in found["milliseconds"].items()}
    return {
        "encoder, one window of 30 s": transcribe.compare(*encode, rounds),
        f"greedy decoding, {TOKENS} tokens, one stream": found | {"milliseconds a token": per_token},
    }


def _batched(size: str, rounds: int) -> dict[str, Any]:
    encode, decode = _runs(size, BATCH)
    whole = [{name: partial(_both, run, part[1][name]) for name, run in part[0].items()}
             for part in zip(encode, decode, strict=True)]  # fmt: skip
    found = transcribe.compare(*whole, rounds)
    speed = {name: round(30_000 * BATCH / value, 1) for name, value in found["milliseconds"].items()}
    return {f"encoder and {TOKENS} tokens of each": found | {"seconds of sound a second": speed}}


def _both(first: Callable[[], Any], second: Callable[[], Any]) -> None:
    first()
    second()


def _runs(size: str, batch: int) -> tuple[tuple[dict, dict], tuple[dict, dict]]:
    """(ours, theirs) of the encoder and of greedy decoding, in float16, each waiting for the device at its end."""
    from transformers.modeling_outputs import BaseModelOutput

    plain = transcribe_peers.checkpoint(size)
    made = for_inference(plain, "auto", "cuda")
    theirs = transcribe_peers.transformers_model(plain).to("cuda", torch.float16)
    mel = torch.randn(batch, plain.model.config.encoder.bands, 3000, device="cuda")
    frames = made.model.encoder(mel)
    prompt = torch.tensor([plain.tokenizer.sot_sequence("en", timestamps=False)] * batch, device="cuda")

    decoder, room = made.model.decoder, prompt.shape[1] + TOKENS

    def greedy(step: search.Step, cache: Cache) -> None:
        search.greedy(step, prompt, cache, eos=plain.tokenizer.eot, max_new=TOKENS)

    def ours() -> None:
        greedy(*graphs.static_step(decoder, frames, None, room, last=1))

    def without() -> None:
        greedy(search.over_source(partial(decoder, last=1), frames), decoder.new_cache(room=room))

    def peer() -> None:
        theirs.generate(
            encoder_outputs=BaseModelOutput(frames), decoder_input_ids=prompt, max_new_tokens=TOKENS, do_sample=False,
            suppress_tokens=None, begin_suppress_tokens=None,
        )  # fmt: skip

    encode = ({"ours": _waited(partial(made.model.encoder, mel))},
              {"transformers": _waited(partial(theirs.model.encoder, mel.half()))})  # fmt: skip
    decode = {"ours": _waited(ours), "ours without graphs": _waited(without)}
    return encode, (decode, {"transformers": _waited(peer)})


def _waited(run: Callable[[], Any]) -> Callable[[], None]:
    def waited() -> None:
        run()
        torch.cuda.synchronize()

    return waited
