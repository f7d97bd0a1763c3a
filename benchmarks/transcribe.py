"""Transcription beside its peers in one run: log-mel, encoder, greedy decoding, 30 s from end to end.

    python benchmarks/transcribe.py                    CPU, whisper-tiny's sizes, one and two threads
    python benchmarks/transcribe.py --size base
    python benchmarks/transcribe.py --device cuda      what a GPU does, beside transformers

Weights are random, of the released sizes, the same in every library. Each thread count is a process of its own, with
every library held to it. The candidates take turns within a round, so that drift of the machine's speed falls on all
alike; times are the least over the rounds, ratios medians of the rounds' ratios (above 1: ours is faster), and beside
them the ratios of the least times, which say more where other programs run at the same time. The figures are printed
and kept in `transcribe.json` beside this file.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TOKENS = 64
ANSWER = 96  # tokens of 30 s of quick speech


def compare(
    ours: dict[str, Callable[[], Any]], peers: dict[str, Callable[[], Any]], rounds: int, warm: bool = True
) -> dict[str, Any]:
    """Least milliseconds of each, and how many times as long as each of ours each peer takes. `warm`: each is run once
    before."""
    todo = ours | peers
    for run in todo.values() if warm else ():
        run()
    taken = {name: [] for name in todo}
    for _ in range(rounds):
        for name, run in todo.items():
            start = time.perf_counter()
            run()
            taken[name].append(1000 * (time.perf_counter() - start))

    def ratio(name: str, peer: str) -> float:
        return round(statistics.median(b / a for a, b in zip(taken[name], taken[peer], strict=True)), 3)

    pairs = {f"{name} against {peer}": (name, peer) for name in ours for peer in peers}
    return {
        "milliseconds": {name: round(min(times), 2) for name, times in taken.items()},
        "times faster": {title: ratio(*pair) for title, pair in pairs.items()},
        "times faster, least times": {
            title: round(min(taken[peer]) / min(taken[name]), 3) for title, (name, peer) in pairs.items()
        },
    }


def mel_of_ten_minutes(rounds: int) -> dict[str, Any]:
    import torch
    import torchaudio
    import whisper

    from multimodal.tokens.mel import log_mel

    wave = torch.randn(600 * 16000, generator=torch.Generator().manual_seed(0)) * 0.1
    transform = torchaudio.transforms.MelSpectrogram(16000, 400, hop_length=160, n_mels=80, mel_scale="slaney")
    error = (log_mel(wave) - whisper.log_mel_spectrogram(wave)).abs().max().item()
    found = compare(
        {"ours": partial(log_mel, wave)},
        {"openai-whisper": lambda: whisper.log_mel_spectrogram(wave),
         "torchaudio": lambda: transform(wave).clamp(min=1e-10).log10()},
        rounds,
    )  # fmt: skip
    return found | {"largest difference from openai-whisper": error}


class Peers:
    """One random model in every library, and the frames of one window."""

    def __init__(self, size: str, folder: Path, threads: int):
        import ctranslate2
        import torch
        import transcribe_peers

        from multimodal.weights.compute import for_inference

        self.threads, self.folder = threads, folder
        self.plain = transcribe_peers.checkpoint(size)
        self.float32, self.auto, self.int8 = (for_inference(self.plain, t) for t in ("float32", "auto", "int8"))
        self.openai = transcribe_peers.openai_model(self.plain)
        transcribe_peers.save_ctranslate2(self.plain, folder)
        self.ctranslate2 = {
            kind: ctranslate2.models.Whisper(str(folder), "cpu", compute_type=kind, intra_threads=threads)
            for kind in ("float32", "int8")
        }
        bands = self.plain.model.config.encoder.bands
        self.mel = torch.randn(1, bands, 3000, generator=torch.Generator().manual_seed(1))
        self.frames = self.plain.model.encoder(self.mel)
        self.views = [ctranslate2.StorageView.from_array(part.numpy()) for part in (self.mel, self.frames)]
        self.prompt = list(self.plain.tokenizer.sot_sequence("en", timestamps=False))

    def greedy(self, checkpoint: Any) -> list[int]:
        """`TOKENS` ids after the prompt, without rules; no end is likely."""
        import torch

        from multimodal import search

        decoder, eot = checkpoint.model.decoder, checkpoint.tokenizer.eot
        step = search.over_source(partial(decoder, last=1), self.frames)
        cache = decoder.new_cache(room=len(self.prompt) + TOKENS)
        return search.greedy(step, torch.tensor([self.prompt]), cache, eos=eot, max_new=TOKENS).ids[0]

    def greedy_ctranslate2(self, kind: str) -> list[int]:
        # it decodes half of max_length
        found = self.ctranslate2[kind].generate(
            self.views[1], [self.prompt], beam_size=1, max_length=2 * TOKENS, suppress_blank=False, suppress_tokens=[]
        )
        return found[0].sequences_ids[0]

    def greedy_openai(self) -> list[int]:
        import whisper

        options = whisper.DecodingOptions(
            language="en", without_timestamps=True, sample_len=TOKENS, suppress_tokens="", suppress_blank=False,
            fp16=False,
        )  # fmt: skip
        return whisper.decode(self.openai, self.frames, options)[0].tokens


def encoders(peers: Peers, rounds: int) -> dict[str, Any]:
    import torch

    kinds = {"ours auto": peers.auto, "ours float32": peers.float32}
    found = compare(
        {name: partial(made.model.encoder, peers.mel) for name, made in kinds.items()},
        {"openai-whisper float32": partial(peers.openai.encoder, peers.mel)}
        | {f"CTranslate2 {kind}": partial(model.encode, peers.views[0], True)
           for kind, model in peers.ctranslate2.items()},
        rounds,
    )  # fmt: skip
    right = peers.openai.encoder(peers.mel)
    errors = {name: torch.dist(made.model.encoder(peers.mel), right) / right.norm() for name, made in kinds.items()}
    return found | {"relative error": {name: float(f"{error.item():.2e}") for name, error in errors.items()}}


def decoders(peers: Peers, rounds: int) -> dict[str, Any]:
    ours = {"ours float32": partial(peers.greedy, peers.float32), "ours int8": partial(peers.greedy, peers.int8)}
    others = {f"CTranslate2 {kind}": partial(peers.greedy_ctranslate2, kind) for kind in peers.ctranslate2}
    others["openai-whisper float32"] = peers.greedy_openai
    tokens = {name: run() for name, run in (ours | others).items()}
    right = tokens["openai-whisper float32"]
    same = {name: sum(a == b for a, b in zip(ids, right, strict=True)) for name, ids in tokens.items()}
    for name, count in same.items():
        if "float32" in name and count != TOKENS:
            raise SystemExit(f"{name}: {count} of {TOKENS} tokens are openai-whisper's")
    found = compare(ours, others, rounds)
    return found | {f"tokens of {TOKENS} as openai-whisper's": same, "different tokens": len(set(right))}


def end_to_end(peers: Peers, rounds: int) -> dict[str, Any]:
    """30 s of samples to text: one greedy attempt, no time tokens, `ANSWER` tokens."""
    from faster_whisper import WhisperModel

    from multimodal import transcribe
    from multimodal.tokens.audio import read_audio

    wave = read_audio(HERE.parent / "assets" / "sample" / "speech.flac")
    wave = wave.repeat(30 * 16000 // len(wave) + 1)[: 30 * 16000].contiguous()
    faster = {
        kind: WhisperModel(str(peers.folder), "cpu", compute_type=kind, cpu_threads=peers.threads)
        for kind in peers.ctranslate2
    }
    common = {"language": "en", "temperature": 0.0, "without_timestamps": True, "compression_ratio_threshold": None,
              "no_speech_threshold": None}  # fmt: skip

    def ours(checkpoint: Any, compute_type: str) -> list[int]:
        limits = {"sample_len": ANSWER, "logprob_threshold": None}
        found = transcribe(wave, checkpoint, compute_type=compute_type, **limits, **common)
        return [token for segment in found["segments"] for token in segment["tokens"]]

    def theirs(model: WhisperModel) -> list[int]:
        # its limit is halved, after the four ids of the prompt were added
        segments, _ = model.transcribe(
            wave.numpy(), beam_size=1, max_new_tokens=2 * ANSWER - 4, log_prob_threshold=None, **common
        )
        return [token for segment in segments for token in segment.tokens]

    runs = {f"ours {kind}": partial(ours, peers.plain, kind) for kind in ("int8", "auto")}
    others = {f"faster-whisper {kind}": partial(theirs, model) for kind, model in faster.items()}
    tokens = {name: run() for name, run in (runs | others).items()}
    counts = {name: len(ids) for name, ids in tokens.items()}
    if set(counts.values()) != {ANSWER}:
        raise SystemExit(f"not {ANSWER} tokens each: {counts}")
    return compare(runs, others, rounds) | {"tokens": counts}


def on_cpu(size: str, threads: int, rounds: int) -> dict[str, Any]:
    import torch

    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        peers = Peers(size, Path(folder) / "ctranslate2", threads)
        return {
            "log-mel of 10 minutes": mel_of_ten_minutes(rounds),
            "encoder, one window of 30 s": encoders(peers, rounds),
            f"greedy decoding, {TOKENS} tokens": decoders(peers, rounds),
            f"30 s end to end, {ANSWER} tokens": end_to_end(peers, rounds),
        }


def in_process(size: str, threads: int, rounds: int) -> dict[str, Any]:
    """The measurements of one thread count, from a process that has never known another."""
    environment = os.environ | {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    command = [sys.executable, __file__, "--size", size, "--rounds", str(rounds), "--child", str(threads)]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment, text=True).stdout
    return json.loads(answer.splitlines()[-1])


def show(name: str, found: dict[str, Any]) -> None:
    print(f"\n{name}")
    for section, figures in found.items():
        print(f"  {section}")
        for title, values in figures.items():
            values = values if isinstance(values, dict) else {"": values}
            print(f"    {title}: " + ", ".join(f"{key} {value}".strip() for key, value in values.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="tiny", help="sizes of this released Whisper model")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(on_cpu(options.size, options.child, options.rounds)))
        return
    if options.device == "cuda":
        import transcribe_gpu

        found = transcribe_gpu.measure(options.rounds)
    else:
        found = {f"{options.size}, {n} thread{'s' * (n > 1)}": in_process(options.size, n, options.rounds)
                 for n in options.threads}  # fmt: skip
    for name, sections in found.items():
        show(name, sections)
    if found:
        path = HERE / "transcribe.json"
        kept = json.loads(path.read_text()) if path.exists() else {}
        machine = f"{platform.processor() or platform.machine()}, Python {platform.python_version()}"
        for name, sections in found.items():
            kept[name] = {"machine": machine, "rounds": options.rounds} | sections
        path.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
