"""Weight files that would run code, reach outside their folder, or claim more data than they hold."""

import io
import json
import os
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.helpers.data import hostile

from .checkpoints import edited, vouched
from .rows import Row, silent

HUGE = 1 << 41  # bytes; no machine that runs tests has them free


def convert(name: str, make: Callable[[], object], cause: str, file: str = "x.pt") -> Row:
    return Row(name, f"convert {file} out/made", make, [re.compile(f"^multimodal: error: {file}: .*{cause}")], silent)


def info(name: str, what: str, make: Callable[[], object], cause: str) -> Row:
    return Row(name, f"info {what}", make, [re.compile(cause)], silent)


def script_over_a_file() -> None:
    Path(hostile.TARGET).write_text("precious")
    hostile.hostile_script("x.pt")


def sparse() -> None:
    """Sparse tensor whose index lies outside its shape."""
    wrong = torch.ones(2).to_sparse()
    wrong._indices()[0, 0] = 10**9
    torch.save({"weight": wrong}, "x.pt")


def sparse_nemo() -> None:
    member = tarfile.TarInfo("model_config.yaml")
    member.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
    member.size = 512
    with tarfile.open("x.nemo", "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(member, io.BytesIO(bytes(512)))


def long_nemo() -> None:
    member = tarfile.TarInfo("model_config.yaml")
    member.size = 2 << 20
    with tarfile.open("x.nemo", "w") as archive:
        archive.addfile(member, io.BytesIO(bytes(2 << 20)))


def header(content: object, size: int | None = None, file: str = "x.safetensors") -> None:
    """A safetensors file of this header, `size` bytes long without taking them on disk."""
    data = json.dumps(content).encode()
    with open(file, "wb") as stream:
        stream.write(len(data).to_bytes(8, "little") + data)
        stream.truncate(8 + len(data) + size if size else None)


def huge(file: str = "x.safetensors") -> None:
    header({"w": {"dtype": "F32", "shape": [HUGE // 4], "data_offsets": [0, HUGE]}}, HUGE, file)


def huge_in_a_folder() -> None:
    huge("clip/model.safetensors")


def huge_archive() -> None:
    with open("x.pt", "wb") as file:
        file.write(b"PK\3\4")
        file.truncate(HUGE)


def long_header() -> None:
    with open("x.safetensors", "wb") as file:
        file.write((20 << 20).to_bytes(8, "little"))
        file.truncate(21 << 20)


def shards(place: str) -> Callable[[], None]:
    """An index that names `place`, where a good file lies."""

    def make() -> None:
        os.makedirs("hub/inner")
        save_file({"w": torch.ones(2)}, "other.safetensors")
        save_file({"v": torch.ones(2)}, "hub/a.safetensors")
        index = {"weight_map": {"w": place.replace("{here}", str(Path.cwd())), "v": "a.safetensors"}}
        Path("hub/model.safetensors.index.json").write_text(json.dumps(index))

    return make


def timm(**config: object) -> Callable[[], None]:
    def make() -> None:
        os.mkdir("vit")
        names = ("patch_embed.proj.weight", "blocks.0.norm1.weight")
        save_file({name: torch.ones(1) for name in names}, "vit/model.safetensors")
        Path("vit/config.json").write_text(json.dumps({"architecture": "vit_tiny_patch16_224"} | config))

    return make


def listed_outside() -> None:
    vouched(Path("clip"))
    manifest = json.loads(Path("clip/manifest.json").read_text())
    manifest["sha256"]["../red.png"] = "0" * 64
    Path("clip/manifest.json").write_text(json.dumps(manifest))


MANY = {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(60_000)}
OUTSIDE = r"weight_map: '.*' names no file in hub"
ROWS = [
    convert("script that writes a file", lambda: hostile.hostile_script("x.pt"), "with code .*is never run"),
    convert("script that writes over a file", script_over_a_file, "with code .*is never run"),
    convert("script inside another", lambda: hostile.hostile_script("x.pt", hostile.Holds), "module inner .*with code"),
    convert("pickle in a zip", lambda: hostile.hostile_pickle("x.pt"), "names posix.system"),
    convert("pickle in a stream", lambda: hostile.hostile_pickle("x.bin", zipped=False), "names posix.system", "x.bin"),
    convert("pickle in a tar", lambda: hostile.hostile_tar("x.ckpt"), "names posix.system", "x.ckpt"),
    convert("pickle in a packed tar", lambda: hostile.hostile_tar("x.pt", "w:gz"), "a gzip archive"),
    convert("pickle in a .nemo", lambda: hostile.hostile_tar("x.nemo"), "names posix.system", "x.nemo"),
    convert("sparse file in a .nemo", sparse_nemo, "'model_config.yaml' is no plain file", "x.nemo"),
    convert("long configuration in a .nemo", long_nemo, "has 2097152 bytes, more than 1048576", "x.nemo"),
    convert("sparse tensor with a wild index", sparse, "_rebuild_sparse_tensor; only dense tensors"),
    convert("archive longer than memory", huge_archive, "needs 2.2 TB of memory"),
    convert("truncated archive", lambda: hostile.cut("x.pt", 0.7), "a damaged file"),
    convert("pipe", lambda: os.mkfifo("x.pt"), "not a regular file"),
    info("safetensors longer than memory", "x.safetensors", huge, r"x\.safetensors: needs 2\.2 TB of memory, .* free"),
    info("folder longer than memory", "{copy:clip}", huge_in_a_folder, r"clip/model\.safetensors: needs 2\.2 TB"),
    info("header beyond the file", "x.safetensors", lambda: Path("x.safetensors").write_bytes(b"\xff" * 7 + b"\0{}"),
         r"x\.safetensors: cannot be read as safetensors"),
    info("tensor beyond the file", "x.safetensors",
         lambda: header({"w": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}, 8),
         r"x\.safetensors: cannot be read as safetensors"),
    info("axis beyond 63 bits", "x.safetensors",
         lambda: header({"w": {"dtype": "F32", "shape": [1 << 63, 0], "data_offsets": [0, 0]}}),
         r"x\.safetensors: cannot be read as safetensors"),
    info("long header", "x.safetensors", long_header, r"x\.safetensors: a header of 20971520 bytes, more than"),
    info("many empty tensors", "x.safetensors", lambda: header(MANY), "holds 60000 tensors, more than 50000"),
    info("many layers", "{copy:clip}",
         edited("config.json", lambda text: text.replace('"layers": 2', '"layers": 999')),
         r"clip/config\.json: layers: 1998 in all, more than the \d+ tensors of the file can fill"),
    info("shard above", "hub", shards("../other.safetensors"), OUTSIDE),
    info("shard at an absolute path", "hub", shards("{here}/other.safetensors"), OUTSIDE),
    info("shard round about", "hub", shards("inner/../../other.safetensors"), OUTSIDE),
    info("shard with a name of 5,000 letters", "hub", shards("a" * 5000), OUTSIDE),
    info("shard that is missing", "hub", shards("b.safetensors"), r"hub/b\.safetensors: no such file"),
    info("shard without the tensor", "hub", shards("a.safetensors"), r"hub/a\.safetensors: tensor 'w' is missing"),
    info("manifest that lists a file elsewhere", "{copy:clip}", listed_outside, r"manifest\.json.*'\.\./red\.png'"),
    info("timm name to fetch", "vit", timm(architecture="hf-hub:nobody/nothing"), "timm has no model 'hf-hub:nobody"),
    info("timm option to read", "vit", timm(model_args={"checkpoint_path": "red.png"}), "no option 'checkpoint_path'"),
    info("timm depth", "vit", timm(model_args={"depth": 10**9}), "depth 1000000000, more than the 2 tensors"),
]  # fmt: skip
