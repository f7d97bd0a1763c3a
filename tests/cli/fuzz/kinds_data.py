"""Fuzz kinds of data: lists, archives, texts, and files that the commands wrote."""

import gzip
import json
import os
import shutil
from pathlib import Path

from tests.helpers.paths import SHARED_DATA

from .child import Case, Place
from .kinds import KINDS, LABELS, damaged, kind, mutate
from .mutators import Random
from .seeds import Seeds

__all__ = ["KINDS"]  # with those of this module
ROWS = 1000  # error lines allowed where each line of a file may have one; a line may repeat 500 times


@kind
def lists(r: Random, seeds: Seeds, place: Place) -> Case:
    place.clear()
    clip, asr, captioner = (seeds.model(name) for name in ("clip", "asr", "captioner"))
    shutil.copytree(seeds / "lists", ".", dirs_exist_ok=True)
    name, words = r.choice((
        *((f"images.{e}", ["validate", f"images.{e}", "--workers", "1"]) for e in ("csv", "tsv", "jsonl")),
        *((f"images.{e}", ["evaluate", "zeroshot", f"images.{e}", "-m", clip]) for e in ("csv", "jsonl")),
        ("audio.jsonl", ["evaluate", "asr", "audio.jsonl", "-m", asr]),
        ("audio.csv", ["validate", "audio.csv", "--kind", "audio"]),
        ("captions.jsonl", ["evaluate", "captions", "captions.jsonl", "-m", captioner]),
        ("captions.jsonl", ["evaluate", "retrieval", "captions.jsonl", "-m", clip]),
        ("predictions.jsonl", ["evaluate", "captions", "captions.jsonl", "--predictions", "predictions.jsonl"]),
        ("metadata.jsonl", ["validate", "."]),
        *((f, ["classify", "red.png", "--labels_file", f, "-m", clip]) for f in ("labels.txt", "labels.json")),
        ("templates.txt", ["classify", "red.png", *LABELS, "--templates", "templates.txt", "-m", clip]),
        ("classes.jsonl", ["evaluate", "zeroshot", "images.csv", "--classes", "classes.jsonl", "-m", clip]),
        ("preprocessing.json", ["classify", "red.png", *LABELS, "--preprocessing", "preprocessing.json", "-m", clip]),
    ))  # fmt: skip
    bad = mutate(r, Path(name))
    return Case(words, bad, most=ROWS if words[0] == "evaluate" else 1)


@kind
def tars(r: Random, seeds: Seeds, place: Place) -> Case:
    place.clear()
    source = r.choice(sorted((seeds / "tars").iterdir()))
    shutil.copy(source, source.name)
    bad = mutate(r, Path(source.name))
    words = ["evaluate", "zeroshot"] if "images" in source.name else ["evaluate", "asr"]
    model = seeds.model("clip" if "images" in source.name else "asr")
    command = [*words, str(bad), "-m", model] if r.random() < 0.4 else ["validate", str(bad), "--workers", "1"]
    return Case(command, bad, most=ROWS, allowed=[f"{bad}*"] if source.name.endswith(".gz") else [])


@kind
def texts(r: Random, seeds: Seeds, place: Place) -> Case:
    place.clear()
    shutil.copytree(seeds / "lists", ".", dirs_exist_ok=True)
    lm, translator = seeds.model("lm"), seeds.model("translator")
    name, words = r.choice((
        ("prompts.txt", ["generate", "--file", "prompts.txt", "-m", lm, "--max_new_tokens", "4"]),
        ("prompts.txt", ["embed", "--file", "prompts.txt", "-m", seeds.model("encoder"), "-o", "out/v.jsonl"]),
        ("prompts.txt", ["translate", "--file", "prompts.txt", "-m", translator, "--from", "en", "--to", "de",
                         "--beam_size", "1"]),
        *((f, ["generate", "a", "--examples", f, "-m", lm, "--max_new_tokens", "4"]) for f in (
            "examples.jsonl", "examples.tsv")),
    ))  # fmt: skip
    return Case(words, mutate(r, Path(name)), most=ROWS)


PAGE = ("A lemon is a small tree that has yellow fruit.", "Menu", "Its juice is used in kitchens around the world.",
        "Terms of use", "The fruit was first grown in Assam a long time ago [1].", "It is sour, he said.")  # fmt: skip


@kind
def cleaning(r: Random, seeds: Seeds, place: Place) -> Case:
    """Pages to clean; half of the time a second run over what the first left."""
    from multimodal.data.cleaning.compression import zstd

    place.clear()
    pages = ["\n".join(r.sample(PAGE, r.randint(3, 6))) for _ in range(r.randint(1, 8))]
    lines = r.random() < 0.6
    rows = "".join(json.dumps({"text": page, "id": i}) + "\n" for i, page in enumerate(pages))
    bad = Path("pages.jsonl" if lines else "pages.txt")
    bad.write_text(rows if lines else "\n\n".join(pages))
    if (packed := r.choice(("", "", ".gz", ".zst"))) and r.random() < 0.5:
        mutate(r, bad)  # within what is packed
    if packed:
        pack = gzip.compress if packed == ".gz" else zstd.compress
        inner, bad = bad, bad.with_name(f"{bad.name}{packed}")
        bad.write_bytes(pack(inner.read_bytes()))
        inner.unlink()
    if not packed or r.random() < 0.5:
        mutate(r, bad)
    flags = r.choice(([], ["--explain", "out/dropped.jsonl"], ["--min_sentences", "1", "--near_duplicates", "0.8"]))
    name = r.choice(("out/clean.jsonl", "out/clean.txt.gz"))
    return Case(["clean", str(bad), "-o", name, "--workers", "1", *flags], bad, most=ROWS)


@kind
def ngram(r: Random, seeds: Seeds, place: Place) -> Case:
    place.clear()
    shutil.copytree(seeds / "lists", ".", dirs_exist_ok=True)
    name = r.choice(("words.arpa", "words.arpa", "words.arpa.gz"))
    bad = mutate(r, Path(name))
    return Case(["transcribe", "0.wav", "-m", seeds.model("asr"), "-o", "out", "--lm", str(bad)], bad)


@kind
def classifier(r: Random, seeds: Seeds, place: Place) -> Case:
    """Re-hash the record half of the time, to reach the code behind the hash."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    from multimodal.tasks.classify.classifier_file import _digest

    place.clear()
    shutil.copy(seeds / "made" / "images" / "00.png", "red.png")
    source = seeds / "made" / "saved.safetensors"
    bad = Path("bad.safetensors")
    if r.random() < 0.5:
        shutil.copy(source, bad)
        mutate(r, bad)
    else:
        with safe_open(source, "pt") as file:
            told, weights = file.metadata(), file.get_tensor("weights")
        record = Path("record.json")
        record.write_text(told["classifier"])
        text = mutate(r, record).read_bytes().decode("utf-8", "replace")
        record.unlink()
        if r.random() < 0.2:
            shape = r.choice(((0, 16), (2, 7), (2,), (2, 16, 1), (3, 16)))
            weights = torch.full(shape, r.choice((1.0, float("nan"))))
        told = told | {"classifier": text, "sha256": _digest(weights, text)}
        save_file({"weights": weights}, bad, metadata=told)
    command = ["classify", "red.png", "--classifier", str(bad), "-m", seeds.model("clip")]
    if r.random() < 0.2:
        command = ["evaluate", "zeroshot", str(seeds / "lists" / "images.csv"), *command[2:]]
    return Case(command, bad)


@kind
def results(r: Random, seeds: Seeds, place: Place) -> Case:
    """Mutate a results file or its record in the output folder; the same command resumes."""
    place.clear()
    shutil.copytree(seeds / "made" / "images", "images")
    name = r.choice(("classes.csv", "classes.jsonl", "captions.csv"))
    for file in (seeds / "made").glob(f"{name}*"):
        shutil.copy(file, Path("out") / file.name)
    record = Path("out") / f"{name}.settings.json"  # names are relative to where the first call was made
    record.write_text(json.dumps(json.loads(record.read_text()) | {"folder": os.getcwd()}))
    bad = mutate(r, r.choice((Path("out") / name, Path("out") / name, record)))
    some = [f"images/0{i}.png" for i in range(4)]
    own = [*LABELS, "-m", seeds.model("clip")] if "classes" in name else ["-m", seeds.model("captioner")]
    return Case(["classify" if "classes" in name else "caption", *some, *own, "-o", f"out/{name}"], bad)


@kind
def index(r: Random, seeds: Seeds, place: Place) -> Case:
    place.clear()
    made = seeds / "made" / r.choice(("flat", "ivf"))
    os.rmdir("out")
    shutil.copytree(made, "out")
    bad = r.choice(sorted(path for path in Path("out").iterdir() if path.name != "lock"))
    mutate(r, bad, made.joinpath("index.json").read_bytes())
    finish = (lambda: revouched(Path("out"))) if r.random() < 0.5 and bad.name != "index.json" else None
    if finish:
        finish()
    command = ["search", "red", "--index", "out"]
    if r.random() < 0.25:
        command = ["index", str(seeds / "made" / "images"), "-o", "out", "-m", seeds.model("clip"), "--kind", made.name]
    return Case(command, bad, finish=finish)


def revouched(folder: Path) -> None:
    """Update sizes and times in index.json to the files; a file with a known time is not read."""
    record = json.loads((folder / "index.json").read_text())
    for part, known in record["files"].items():
        begin = part if part != "search" else record["kind"]
        for path in folder.glob(f"{begin}-*"):
            known |= {"bytes": path.stat().st_size, "mtime_ns": path.stat().st_mtime_ns}
    (folder / "index.json").write_text(json.dumps(record))


@kind
def state(r: Random, seeds: Seeds, place: Place) -> Case:
    """Mutate a training state, with fresh checksums half of the time, and resume from it."""
    from .functions import marked, resume

    place.clear()
    shutil.copytree(seeds / "states" / "run", "out/run")
    newest = sorted(Path("out/run/states").glob("state-*"))[-1]
    bad = mutate(r, r.choice(sorted(path for path in newest.iterdir() if path.is_file())))
    finish = (lambda: marked(newest)) if r.random() < 0.6 and bad.name != "complete.json" else None
    if finish:
        finish()
    return Case(resume, bad, finish=finish, logs=True)


@kind
def recipe(r: Random, seeds: Seeds, place: Place) -> Case:
    """Data that recipes read: labelled images, texts, tables."""
    from .functions import FUNCTIONS

    place.clear()
    shutil.copytree(seeds / "lists", ".", dirs_exist_ok=True)
    make, files = r.choice(FUNCTIONS)
    bad = damaged(r, [Path(name) for name in files], "bad")
    return Case(lambda: make(bad), bad, logs=True)


@kind
def shared(r: Random, seeds: Seeds, place: Place) -> Case:
    """Real files beside the repository, if present."""
    from .kinds import audio, image

    found = sorted(
        [*SHARED_DATA.glob("vision/flickr8k-1000/images/*.jpg"), *SHARED_DATA.glob("speech/*/audio/*/*.opus")][:400]
    )
    if not found:
        return r.choice((image, audio))(r, seeds, place)
    source = r.choice(found)
    place.clear()
    bad = damaged(r, [source])
    if source.suffix == ".jpg":
        return Case(["classify", str(bad), *LABELS, "-m", seeds.model("clip")], bad)
    return Case(["transcribe", str(bad), "-m", seeds.model("asr"), "-o", "out", "-f", "txt"], bad)
