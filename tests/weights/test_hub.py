"""Public models by name and their downloads, from a local server that speaks the hub's protocol."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from multimodal import load
from multimodal.errors import CheckpointError, UsageError
from multimodal.system.assets import shipped
from multimodal.weights.hub import registry
from multimodal.weights.hub.download import repository_of, wanted
from multimodal.weights.hub.revisions import REVISIONS
from tests.helpers.commands import run
from tests.helpers.data.servers import LocalServer, QuietRequest

COMMIT = "1" * 40
LARGE = 24 << 20  # huggingface_hub writes 10 MiB at a time


class HubServer(LocalServer):
    """`files`: of each repository, path and content. `stop_after`: bytes of a large file after which the connection
    is `cut`, or stands still. `flip`: send one wrong byte. `ranges`: offsets at which large files were asked for.
    `revisions`: asked for; `missing`: those that no repository has. `oids`: false hashes by file name, `etag`: in
    headers. `refusal`: status and headers of each answer of its API; `gated`: none may read the files."""

    def __init__(self):
        super().__init__(HubRequest)
        self.files: dict[str, dict[str, bytes]] = {}
        self.stop_after, self.cut, self.flip = 0, False, False
        self.ranges: list[int] = []
        self.paths: list[str] = []
        self.revisions: list[str] = []
        self.missing: set[str] = set()
        self.oids: dict[str, str] = {}
        self.etag, self.gated, self.refusal = "", False, ()


class HubRequest(QuietRequest, BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if self.server.refusal and path.startswith("/api/"):
            return self._send(self.server.refusal[0], b"{}", self.server.refusal[1])
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(tree|revision)/.*", path):
            repository, what = match.groups()
            self.server.revisions.append(revision := path.rpartition("/")[2])
            if revision in self.server.missing:
                return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            if (files := self.server.files.get(repository)) is None:
                return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            entries = [entry(name, content) for name, content in files.items()]
            for name, oid in self.server.oids.items():
                facts = next(one for one in entries if one["path"] == name)
                facts.get("lfs", facts)["oid"] = oid
            return self._send(
                200, json.dumps(entries if what == "tree" else {"id": repository, "sha": commit(revision)}).encode()
            )
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.*)", path):
            repository, revision, name = match.groups()
            self.server.revisions.append(revision)
            if self.server.gated:
                return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
            return self._file(name, self.server.files[repository][name], commit(revision))
        self._send(404, b"{}")  # what the client asks for beside files

    def _file(self, name: str, content: bytes, commit: str) -> None:
        facts = entry(name, content)
        begin = int(re.match(r"bytes=(\d+)-", self.headers.get("Range", "bytes=0-"))[1])
        oid = self.server.etag or facts.get("lfs", facts)["oid"]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{oid}"', "Accept-Ranges": "bytes"}
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        if self.command == "GET":
            self.server.paths.append(name)
        if self.command == "GET" and "lfs" in facts:
            self.server.ranges.append(begin)
            if self.server.flip:
                content = content[:-1] + bytes([content[-1] ^ 1])
        self._send(206 if begin else 200, content[begin:], headers)

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json"} | (headers or {})).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        stop = self.server.stop_after
        if not stop or len(content) < LARGE // 4:
            self.wfile.write(content)
            return
        self.wfile.write(content[:stop])
        self.wfile.flush()
        if self.server.cut:
            self.server.stop_after = 0
            self.close_connection = True
        else:
            time.sleep(60)


def commit(revision: str) -> str:
    return revision if re.fullmatch("[0-9a-f]{40}", revision) else COMMIT


def entry(name: str, content: bytes) -> dict:
    """A file as the hub's tree lists it."""
    oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    facts = {"type": "file", "path": name, "size": len(content), "oid": oid}
    if name.endswith((".safetensors", ".bin")):
        facts["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return facts


@pytest.fixture
def server() -> Iterator[HubServer]:
    with HubServer() as made:
        made.files["owner/large"] = {
            "config.json": b"{}", "README.md": b"#", "model.safetensors": os.urandom(LARGE),
            "model.fp32.safetensors": b"other", "pytorch_model.bin": b"pickled", "onnx/config.json": b"{}",
        }  # fmt: skip
        yield made


@pytest.fixture
def command(server, tmp_path, monkeypatch, capsys):
    """Run a command in this process, with huggingface_hub's settings as it reads them from the environment."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _cache_manager

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    for module in (constants, _cache_manager):
        monkeypatch.setattr(module, "HF_HUB_CACHE", str(tmp_path / "cache"))

    def give(*arguments: str, endpoint: str = server.url, offline: bool = False) -> tuple[int, str, str]:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        return run(capsys, *arguments)

    return give


def blobs(tmp_path: Path, name: str = "owner--large") -> dict[str, int]:
    return {path.name: path.stat().st_size for path in (tmp_path / "cache" / f"models--{name}" / "blobs").glob("*")}


def test_a_download_takes_what_load_reads_and_is_listed_and_deleted(server, command, tmp_path):
    code, out, err = command("download", "owner/large")
    assert (code, err) == (0, "")
    assert out.startswith("owner/large: 25.2 MB, checked: ")
    assert sorted(server.paths) == ["config.json", "model.safetensors"]
    folder = Path(out.strip().rpartition(": ")[2])
    assert (folder / "model.safetensors").read_bytes() == server.files["owner/large"]["model.safetensors"]
    code, out, err = command("models", "--cached", "--format", "json")
    assert (code, json.loads(out)) == (0, [{"repository": "owner/large", "size": LARGE + 2, "complete": True}])
    assert command("download", "owner/large", offline=True)[0] == 0
    code, out, err = command("models", "--delete", "owner/large")
    assert (code, out, err) == (0, "owner/large: deleted, 25.2 MB freed\n", "")
    assert not folder.exists()
    assert command("models", "--cached")[1] == "no models in the cache\n"
    code, _, err = command("models", "--delete", "owner/large")
    assert (code, err) == (1, "multimodal: error: owner/large: not in the cache (which is empty)\n")


@pytest.mark.ci
def test_a_cut_connection_goes_on_where_it_broke(server, command, tmp_path):
    server.stop_after, server.cut = LARGE // 2, True
    code, out, _ = command("download", "owner/large")
    assert (code, "checked" in out) == (0, True)
    assert server.ranges == [0, 10 << 20]


@pytest.mark.ci
def test_a_killed_download_goes_on_in_another_process(server, command, tmp_path):
    server.stop_after = LARGE // 2
    settings = {"HF_ENDPOINT": server.url, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "multimodal", "download", "owner/large"], env=os.environ | settings,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    digest = hashlib.sha256(server.files["owner/large"]["model.safetensors"]).hexdigest()
    while blobs(tmp_path).get(f"{digest}.incomplete", 0) < 10 << 20:
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait(timeout=120)
    code, out, _ = command("models", "--cached")
    assert (code, "interrupted: multimodal download goes on" in out) == (0, True)
    server.stop_after = 0
    code, out, err = command("download", "owner/large")
    assert (code, err) == (0, "")
    assert server.ranges == [0, 10 << 20]
    assert set(blobs(tmp_path)) == {digest, entry("config.json", b"{}")["oid"]}


@pytest.mark.ci
def test_wrong_bytes_are_refused_and_do_not_stay(server, command, tmp_path):
    server.flip = True
    code, out, err = command("download", "owner/large")
    assert (code, out) == (1, "")
    assert err == (
        "multimodal: error: hf-hub:owner/large: model.safetensors came damaged (its hash differs) and was deleted; "
        "download it again\n"
    )
    assert list(blobs(tmp_path).values()) == [2]
    assert not list((tmp_path / "cache").glob("*/snapshots/*/model.safetensors"))
    server.flip = False
    assert command("download", "owner/large")[0] == 0


@pytest.mark.ci
def test_a_file_that_decayed_in_the_cache_is_downloaded_again(server, command, tmp_path):
    folder = Path(command("download", "owner/large")[1].strip().rpartition(": ")[2])
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(b"damaged")
    assert command("download", "owner/large")[0] == 0
    assert server.ranges == [0, 0]
    assert (folder / "model.safetensors").read_bytes() == server.files["owner/large"]["model.safetensors"]


@pytest.mark.parametrize("settings", [{"offline": True}, {"endpoint": "http://127.0.0.1:9"}])
def test_offline_says_what_to_do(command, settings):
    code, out, err = command("download", "whisper-base", **settings)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("multimodal: error: hf-hub:openai/whisper-base: not in the cache, and the hub cannot be")
    assert err.endswith("; go online and run it again, or give its folder\n")


@pytest.mark.parametrize("settings", [{"offline": True}, {"endpoint": "http://127.0.0.1:9"}])
def test_without_the_hub_files_in_the_cache_are_checked(command, settings):
    folder = Path(command("download", "owner/large")[1].strip().rpartition(": ")[2])
    assert command("download", "owner/large", **settings)[1].startswith("owner/large: 25.2 MB, checked: ")
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(b"damaged")
    code, _, err = command("download", "owner/large", **settings)
    assert (code, "model.safetensors is damaged in the cache (its hash differs); go online" in err) == (1, True)


@pytest.mark.ci
def test_a_hash_of_the_listing_is_never_a_path(server, command, tmp_path):
    (precious := tmp_path / "precious").write_text("mine")
    for name, path in (("config.json", "../../../precious"), ("model.safetensors", str(precious))):
        server.oids = {name: path}
        code, _, err = command("download", "owner/large")
        assert (code, precious.read_text(), err.count("\n")) == (1, "mine", 1)
        assert f"hf-hub:owner/large: {name}: expected a hash of" in err
        assert not list(tmp_path.rglob("precious.*"))
    server.oids, server.etag = {}, "../../../precious"  # a header that huggingface_hub takes for a name
    folder = Path(command("download", "owner/large")[1].strip().rpartition(": ")[2])
    assert (precious.read_text(), (folder / "config.json").read_bytes()) == ("mine", b"{}")


def test_all_of_a_download_is_of_one_commit(server, command, tmp_path):
    command("download", "owner/large")
    assert (server.revisions[0], set(server.revisions[1:])) == ("main", {COMMIT})
    assert (tmp_path / "cache" / "models--owner--large" / "refs" / "main").read_text() == COMMIT


def test_a_complete_cache_needs_no_place_for_locks(server, command, tmp_path):
    command("download", "owner/large")
    shutil.rmtree(tmp_path / "cache" / ".locks")
    (tmp_path / "cache" / ".locks").touch()  # root writes in folders that can only be read
    assert command("download", "owner/large")[0] == 0


def test_a_hub_that_refuses_was_reached(server, command):
    server.refusal = 401, {"X-Error-Message": "Invalid credentials in Authorization header"}
    assert "the hub refused the token, or wants one (" in command("download", "owner/large")[2]
    server.refusal = 429, {"Retry-After": "7"}
    assert command("download", "owner/large")[2].endswith("; run it again after 7 s\n")
    server.refusal = 200, {}  # a login page's
    assert "the hub cannot be reached (another server answers in its place); " in command("download", "owner/large")[2]
    server.refusal, server.gated = (), True
    err = command("download", "owner/large")[2]
    assert err.endswith(f"gated; ask for access at {server.url}/owner/large and set HF_TOKEN to your token\n")


def test_a_repository_that_is_not_on_the_hub_gets_near_names(command):
    code, _, err = command("download", "openai/whisper-bse", "nonsense")
    first, second = err.splitlines()
    assert code == 1
    assert re.fullmatch(r".*hf-hub:openai/whisper-bse: not on the hub, .*near: openai/whisper-base, .*", first)
    assert second.startswith("multimodal: error: model 'nonsense': neither a path nor a known model (near: ")


@pytest.mark.ci
def test_a_model_by_its_name_is_downloaded_and_loaded(server, command, hf_folder, tmp_path):
    server.files["openai/whisper-base"] = {
        str(path.relative_to(hf_folder)): path.read_bytes() for path in hf_folder.rglob("*") if path.is_file()
    }
    code, out, err = command("info", "whisper-base", "--format", "json")
    assert (code, json.loads(out)["kind"]) == (0, "speech_to_text"), err
    assert command("download", "openai/whisper-base", "hf-hub:openai/whisper-base@main")[0] == 0
    assert server.paths.count("model.safetensors") == 1
    shutil.copytree(shipped()["clip-vit-16"], tmp_path / "whisper-base")  # a folder here goes first
    code, out, _ = command("info", "whisper-base", "--format", "json")
    assert (code, json.loads(out)["kind"]) == (0, "clip")


def test_pickled_weights_are_downloaded_where_there_are_no_others(server, command):
    server.files["owner/pickled"] = {"config.json": b"{}", "pytorch_model.bin": b"pickled", "training_args.bin": b"x"}
    code, out, _ = command("download", "owner/pickled")
    assert (code, sorted(server.paths)) == (0, ["config.json", "pytorch_model.bin"])
    assert "pickled weights: multimodal convert hf-hub:owner/pickled FOLDER, then --model FOLDER" in out


def test_a_name_of_the_registry_is_downloaded_at_its_commit(server, command):
    model = registry.find("gpt2")
    server.files[model.repository] = server.files["owner/large"]
    command("download", "gpt2")
    assert re.fullmatch("[0-9a-f]{40}", model.revision)
    assert server.revisions[0] == model.revision
    assert command("download", "gpt2", offline=True)[0] == 0
    server.missing = {"gone"}
    code, _, err = command("download", "hf-hub:owner/large@gone")
    assert code == 1
    assert "hf-hub:owner/large: has no revision gone (the newest: hf-hub:owner/large@main)" in err


def test_every_commit_is_one_of_a_listed_model():
    assert REVISIONS.keys() <= {model.repository for model in registry.MODELS}
    assert all(re.fullmatch("[0-9a-f]{40}", commit) for commit in REVISIONS.values())
    assert len(set(REVISIONS.values())) == len(REVISIONS)


def test_shards_and_sentence_modules_are_wanted_and_copies_are_not():
    files = ["model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
             "model.fp32-00001-of-00001.safetensors", "1_Pooling/config.json", "onnx/model.onnx"]  # fmt: skip
    assert wanted(files) == sorted([*files[:3], files[4]])
    dense = [f"2_Dense/{name}" for name in ("config.json", "model.safetensors", "pytorch_model.bin", "rust_model.ot")]
    assert wanted([*files, *dense]) == sorted([*files[:3], files[4], *dense[:2]])
    assert wanted([*files, *dense], pickled=True) == sorted([*files[:3], files[4], *dense[:3]])
    assert wanted(["open_clip_model.safetensors", "model.safetensors"]) == ["open_clip_model.safetensors"]
    assert wanted(["chat_template.jinja", "model.safetensors"]) == ["chat_template.jinja", "model.safetensors"]


@pytest.mark.parametrize(("name", "repository"), [
    ("whisper-base", "openai/whisper-base"), ("openai/whisper-base", "openai/whisper-base"),
    ("ViT-B-32", "openai/clip-vit-base-patch32"), ("vit-b/32", "openai/clip-vit-base-patch32"),
    ("clip-vit-base-patch32", "openai/clip-vit-base-patch32"), ("facebook/bart-base", "facebook/bart-base"),
    ("opus-mt-en-de", "Helsinki-NLP/opus-mt-en-de"), ("whisper-large", "openai/whisper-large-v3"),
    ("somebody/something-1.7B", "somebody/something-1.7B"),
])  # fmt: skip
def test_names_as_users_type_them(name, repository):
    assert repository_of(name) == (repository, REVISIONS.get(repository, "main"))


@pytest.mark.parametrize("name", ["nonsense", "a/b/c", "../x", "./x/y", "/x", "tests/none", "x/", ""])
def test_other_names_are_no_repositories(name, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    assert repository_of(name) is None


def test_an_unknown_name_gets_the_nearest_of_all():
    for name, near in (("clip-vit-61", "clip-vit-16"), ("wisper-base", "whisper-base"), ("t5_smal", "t5-small"),
                       ("Bart-bse", "bart-base"), ("whisper_base", "whisper-base")):  # fmt: skip
        with pytest.raises(UsageError, match=rf"near: .*\b{near}\b"):
            load(name)


def test_an_unknown_name_like_no_other_gets_the_list():
    with pytest.raises(UsageError, match=r"neither a path nor a known model \(multimodal models lists the known"):
        load("nope/")


def test_spellings_are_one_model_each_and_no_shipped_name():
    names = [name for model in registry.MODELS
             for name in {model.name.lower(), model.repository.lower(), *(a.lower() for a in model.also)}]  # fmt: skip
    assert len(names) == len(set(names))
    assert not set(registry.spellings()) & set(shipped())
    assert [registry.find(x).name for x in ("turbo", "small.en")] == ["whisper-large-v3-turbo", "whisper-small.en"]


@pytest.mark.ci
def test_demonstration_models_are_as_large_as_stated_and_name_a_known_one():
    for name, (size, better) in registry.DEMONSTRATIONS.items():
        assert size == f"{sum(p.numel() for p in load(name).model.parameters()) / 1e6:.1f} M"
        assert registry.find(better).name == better


def test_a_path_object_is_never_a_repository():
    with pytest.raises((UsageError, CheckpointError), match="neither a path"):
        load(Path("openai/whisper-base"))
