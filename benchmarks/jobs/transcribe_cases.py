"""Whisper: log-mel, encoder, decoding, and whole files of one and many windows; wav2vec 2.0: whole files."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.suite.cases import Candidate, Case, Options, in_kinds

SIZE, WIDTH, LAYERS, FRAMES, VOCABULARY = "tiny", 384, 4, 1500, 51865
MINUTES, WINDOWS, BATCH, CTC_SECONDS = 10, 10, 8, 10
TOKENS, ANSWER = 64, 96  # tokens of a decoding; of 30 s of fast speech
LIBRARIES = {"openai_whisper": "openai-whisper", "transformers_whisper": "transformers",
             "ctranslate2_whisper": "ctranslate2", "faster_whisper": "faster-whisper",
             "whisper_cpp": "pywhispercpp", "sherpa": "sherpa-onnx", "transformers_ctc": "transformers",
             "torchaudio_mel": "torchaudio", "ours": "multimodal"}  # fmt: skip
NAMES = {"ctranslate2": "CTranslate2", "pywhispercpp": "whisper.cpp", "multimodal": "ours"}
SAME = ("differing", 0.0)  # tokens


def cases(options: Options) -> list[Case]:
    tiny = {"size": SIZE, "tiny": options.tiny}
    tokens, answer = (8, 8) if options.tiny else (TOKENS, ANSWER)
    return [mel(1 if options.tiny else MINUTES), encoder(tiny), decoding(tiny, tokens, 1),
            decoding(tiny, tokens, 5),
            whole(tiny, answer), ctc(options.tiny), many(tiny, answer, 2 if options.tiny else WINDOWS)]  # fmt: skip


def candidates(function: str, peers: Mapping[str, tuple[str, ...]], settings: dict[str, Any]) -> tuple[Candidate, ...]:
    """`peers`: module of each peer → kinds of arithmetic."""
    return tuple(
        one for file, kinds in peers.items()
        for one in in_kinds(NAMES.get(LIBRARIES[file], LIBRARIES[file]), f"benchmarks.peers.speech.{file}:{function}",
                            settings, LIBRARIES[file], kinds)
    )  # fmt: skip


def case(
    job: str, name: str, unit: str, units: float, function: str, peers: dict[str, tuple[str, ...]],
    settings: dict[str, Any], written: tuple[str, ...], **more: Any,
) -> Case:  # fmt: skip
    return Case(job, name, unit, units, candidates(function, peers, settings),
                prepare="benchmarks.peers.speech.whisper_random:prepare",
                settings={"tokenizer": False} | settings | {"libraries": written}, **more)  # fmt: skip


def mel(minutes: int) -> Case:
    files, settings = ("ours", "openai_whisper", "torchaudio_mel", "faster_whisper"), {"seconds": 60 * minutes}
    return Case(
        "transcribe", f"log-mel of {minutes} minutes", "second of audio", 60 * minutes,
        candidates("log_mel", dict.fromkeys(files, ("float32",)), settings), reference="openai-whisper float32",
        checks={"float32": ("near", 1e-4)}, prepare="benchmarks.peers.speech.whisper_files:noise", settings=settings,
    )  # fmt: skip


def encoder(tiny: dict[str, Any]) -> Case:
    block = 2 * FRAMES * 12 * WIDTH**2 + 4 * FRAMES**2 * WIDTH
    stem = 2 * (2 * FRAMES * 3 * 80 * WIDTH + FRAMES * 3 * WIDTH**2)
    return case(
        "transcribe", "Whisper tiny, encoder", "window of 30 s", 1, "encoder",
        {"ours": ("float32", "bfloat16", "int8"), "openai_whisper": ("float32",), "transformers_whisper": ("float32",),
         "ctranslate2_whisper": ("float32", "int8")},
        tiny, ("openai", "transformers", "ctranslate2"), reference="openai-whisper float32",
        checks={"float32": ("near", 1e-4), "bfloat16": ("cosine", 1e-2), "int8": ("cosine", 1e-2)},
        operations=LAYERS * block + stem,
    )  # fmt: skip


def token_bytes() -> int:
    """Bytes that a token reads in float32: the decoder's and the logits' maps, and the audio's keys and values."""
    return 4 * (LAYERS * (14 * WIDTH**2 + 2 * FRAMES * WIDTH) + VOCABULARY * WIDTH)


def decoding(tiny: dict[str, Any], tokens: int, beams: int) -> Case:
    peers, written = {"ours": ("float32", "int8"), "openai_whisper": ("float32",)}, ("openai", "ctranslate2")
    if beams == 1:
        peers, written = peers | {"transformers_whisper": ("float32",)}, (*written, "transformers")
    name = f"greedy decoding of {tokens} tokens" if beams == 1 else f"beams of {beams}, {tokens} tokens"
    return case(
        "transcribe", f"Whisper tiny, {name}", "token", tokens, "decoder",
        peers | {"ctranslate2_whisper": ("float32", "int8")},
        tiny | {"tokens": tokens, "beams": beams}, written, reference="openai-whisper float32",
        checks={"float32": SAME}, bytes=tokens * token_bytes(),
    )  # fmt: skip


def whole(tiny: dict[str, Any], tokens: int) -> Case:
    made = case(
        "transcribe", f"Whisper tiny, a file of 30 s, {tokens} tokens", "second of audio", 30, "end_to_end",
        {"ours": ("float32", "bfloat16", "int8"), "openai_whisper": ("float32",),
         "transformers_whisper": ("float32",), "faster_whisper": ("float32", "int8"),
         "whisper_cpp": ("int8",)},
        tiny | {"tokens": tokens, "count": tokens, "seconds": 30.0, "tokenizer": True, "ggml": ["float16", "int8"]},
        ("openai", "transformers", "ctranslate2"), reference="openai-whisper float32", checks={"float32": SAME},
    )  # fmt: skip
    (own,) = candidates("end_to_end", {"whisper_cpp": ("float16",)}, made.settings)
    return replace(made, candidates=(*made.candidates, replace(own, kind="float32")))  # it has no float32


def ctc(tiny: bool) -> Case:
    seconds = 2 if tiny else CTC_SECONDS
    settings = {"seconds": float(seconds), "kinds": ["float32", "int8"], "tiny": tiny}
    return Case(
        "transcribe", f"wav2vec 2.0 base, a file of {seconds} s", "second of audio", seconds,
        candidates("ctc", {"ours": ("float32", "bfloat16", "int8"), "transformers_ctc": ("float32",),
                           "sherpa": ("float32", "int8")}, settings),
        reference="transformers float32", checks={"float32": SAME},
        prepare="benchmarks.peers.speech.ctc_random:prepare", settings=settings,
    )  # fmt: skip


def many(tiny: dict[str, Any], tokens: int, windows: int) -> Case:
    settings = tiny | {"tokens": tokens, "count": windows * tokens, "seconds": 30.0 * windows, "windows": windows,
                       "batch": BATCH, "tokenizer": True}  # fmt: skip
    return case(
        "transcribe", f"Whisper tiny, a file of {windows} windows, {BATCH} side by side", "second of audio",
        30 * windows, "end_to_end",
        {"ours": ("float32", "bfloat16", "int8"), "faster_whisper": ("float32", "int8")}, settings, ("ctranslate2",),
    )  # fmt: skip
