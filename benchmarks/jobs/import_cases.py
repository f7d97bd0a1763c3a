"""Whole processes from a cold start: imports, the first classification, the first transcription."""

from benchmarks.suite.cases import OURS, Candidate, Case, Options
from benchmarks.suite.process import ROOT

RUN, CLI = ("{python}", "-c"), ("{python}", "-m", "multimodal")
COLD = ("{python}", "-m", "benchmarks.peers.cold")
MODULES = {
    "open_clip_torch": "import open_clip", "timm": "import timm", "transformers": "from transformers import pipeline",
    "openai-whisper": "import whisper", "faster-whisper": "import faster_whisper",
}  # fmt: skip
LABELS = ("lighthouse", "goldfish", "teapot")
SPEECH = str(ROOT / "assets" / "sample" / "speech.flac")
TOKENS = 24


def cases(options: Options) -> list[Case]:
    return [imports(), shipped(), first_classification(options.tiny), first_transcription(options.tiny)]


def process(name: str, command: tuple[str, ...], library: str = OURS, prints: str = "", **more: bool) -> Candidate:
    return Candidate(name, library=library, command=command, kind="cold start", prints=prints, **more)


def case(name: str, candidates: list[Candidate], **more: object) -> Case:
    return Case("import", name, "start", 1, tuple(candidates), threads=(2,), **more)


def imports() -> Case:
    found = [process("ours, import multimodal", (*RUN, "import multimodal"))]
    found.append(process("ours, multimodal --help", (*CLI, "--help"), prints="transcribe"))
    found.append(process("python alone", (*RUN, "pass"), "Python", floor=True))
    found.append(process("import torch", (*RUN, "import torch"), "torch", floor=True))
    return case("imports", found + [process(line, (*RUN, line), library) for library, line in MODULES.items()])


def shipped() -> Case:
    """First results of shipped models, beside `import torch`."""
    image = "{folder}/image.png"
    speech = ("transcribe", SPEECH, "-o", "{folder}", "-f", "txt")
    found = [
        process("ours, classify", (*CLI, "classify", image, "--labels", *LABELS), prints="goldfish"),
        *(process(f"ours, transcribe, {name}", (*CLI, *speech, "--model", name), prints="-->")
          for name in ("asr-conformer-en", "whisper-mini")),
        process("import torch", (*RUN, "import torch"), "torch", floor=True),
    ]  # fmt: skip
    return case("the shipped models", found, prepare="benchmarks.peers.cold:image")


def first_classification(tiny: bool) -> Case:
    """open_clip's folder of ViT-B/32, random weights, one image and three labels."""
    inputs = ("{folder}/clip", "{folder}/image.png", *LABELS)
    ours = (*CLI, "classify", inputs[1], "--model", inputs[0], "--templates", "none", "--labels", *LABELS)
    found = [process("ours", ours, prints="goldfish"),
             process("open_clip", (*COLD, "open_clip", *inputs), "open_clip_torch", "goldfish")]  # fmt: skip
    return case("first classification, ViT-B/32", found, prepare="benchmarks.peers.cold:clip", settings={"tiny": tiny})


def first_transcription(tiny: bool) -> Case:
    """Whisper tiny's sizes, random weights, `TOKENS` tokens of one window."""
    options = ("--language", "en", "--beam_size", "1", "--temperature_increment_on_fallback", "None",
               "--sample_len", str(TOKENS), "-o", "{folder}", "-f", "txt")  # fmt: skip
    found = [process("ours", (*CLI, "transcribe", SPEECH, "--model", "{folder}/ours", *options), prints="-->")]
    for library, name in (("openai-whisper", "openai_whisper"), ("faster-whisper", "faster_whisper")):
        command = (*COLD, name, "{folder}", SPEECH, str(TOKENS))
        found.append(process(library, command, library, prints="tokens"))
    settings = {"size": "tiny", "tiny": tiny}
    prepare = "benchmarks.peers.speech.whisper_random:prepare"
    return case("first transcription, Whisper tiny", found, prepare=prepare, settings=settings)
