"""Repositories of the Hugging Face hub in its local cache: downloads that resume and are checked, listing, deletion."""

import contextlib
import glob
import hashlib
import os
import re
import shutil
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from multimodal.errors import CheckpointError, UsageError
from multimodal.system.files import write_whole
from multimodal.weights.files.formats import CTRANSLATE2_NAME, PICKLED_NAMES, SAFE_NAMES
from multimodal.weights.hub.registry import find, near

HUB = "hf-hub:"
REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")
PARTS = ("*.json", "*.jinja", "*.txt", "*.model", "*.spm", "*.tiktoken")  # configurations, tokenizers, at the top
MODULE = re.compile(r"\d+_\w+/(config\.json|model\.safetensors)")  # of sentence-transformers
PICKLED_MODULE = re.compile(r"\d+_\w+/pytorch_model\.bin")
GIT, SHA256 = re.compile(r"[0-9a-f]{40}"), re.compile(r"[0-9a-f]{64}")


class Cached(NamedTuple):
    repository: str
    size: int  # bytes
    complete: bool  # False after an interrupted download


def repository_of(name: str) -> tuple[str, str] | None:
    """Repository and revision that a name stands for: hf-hub:OWNER/NAME, with @REVISION or not, a name of the
    registry, or OWNER/NAME; None for another. OWNER may not be a folder here, whose files are meant then."""
    if name.startswith(HUB):
        repository, _, revision = name.removeprefix(HUB).partition("@")
        return repository, revision or "main"
    if model := find(name):
        return model.repository, model.revision
    if REPOSITORY.fullmatch(name) and not os.path.isdir(name.split("/")[0]):
        return name, "main"
    return None


def snapshot(repository: str, revision: str = "main", pickled: bool = False, check: bool = False) -> Path:
    """Folder with the files that `load` reads, downloaded where the cache lacks one.

    An interrupted download goes on where it stopped; a file takes its place in the cache once its hash is right.
    `pickled`: pickled weights, if there are no safetensors. `check`: hash the files in the cache, too, and download
    the damaged ones again. Raises CheckpointError, also for damage if the hub does not answer."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = f"{HUB}{repository}"
    try:
        files, commit, offline = _listing(repository, revision)
        files = {path: files[path] for path in wanted(files, pickled)}
        for file in files.values() if commit else ():
            _link(_fetch(repository, commit, file, check), commit, file.path)
        others = (*PICKLED_NAMES, "*.nemo") if pickled else ()
        rest = [*PARTS, "*.safetensors", CTRANSLATE2_NAME, *others]
        patterns = [glob.escape(path) for path in files] if commit or files else rest
        folder = Path(
            snapshot_download(
                repository,
                revision=commit or revision,
                allow_patterns=patterns,
                tqdm_class=_silent(),
                local_files_only=not commit,
            )
        )
        if commit:
            _name(repository, revision, commit)
        elif check:
            _check(where, folder, pickled)
        return folder
    except GatedRepoError:
        page = f"{constants.ENDPOINT}/{repository}"
        raise CheckpointError(f"{where}: gated; ask for access at {page} and set HF_TOKEN to your token") from None
    except RevisionNotFoundError:
        raise CheckpointError(f"{where}: has no revision {revision[:80]} (the newest: {where}@main)") from None
    except RepositoryNotFoundError:
        names = ", ".join(near(repository, ()))
        raise CheckpointError(f"{where}: not on the hub, or not public{names and f' (near: {names})'}") from None
    except LocalEntryNotFoundError as error:
        raise CheckpointError(f"{where}: not in the cache, and {_no_answer(offline or error)}") from None
    except HFValidationError as error:
        raise CheckpointError(f"{where}: expected OWNER/NAME ({_cause(error)})") from None
    except (HTTPError, OSError) as error:
        raise CheckpointError(f"{where}: download stopped ({_cause(error)}); run it again to go on") from None


def wanted(paths: Iterable[str], pickled: bool = False) -> list[str]:
    """Select the files that `load` reads: one model's weights, configurations and tokenizers."""
    top = [path for path in paths if "/" not in path]
    weights = _weights(top, SAFE_NAMES, ".safetensors")
    if not weights:
        weights = _weights(top, (*(PICKLED_NAMES if pickled else ()), CTRANSLATE2_NAME), ".nemo" if pickled else None)
    parts = [path for path in top if any(fnmatchcase(path, pattern) for pattern in PARTS)]
    modules = [path for path in paths if MODULE.fullmatch(path) or (pickled and PICKLED_MODULE.fullmatch(path))]
    return sorted({*parts, *weights, *modules})


def cached() -> list[Cached]:
    """The models in the hub's cache."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    complete = {repo.repo_id for repo in repositories if repo.repo_type == "model"}
    found = []
    for folder in sorted(Path(constants.HF_HUB_CACHE).glob("models--*")):
        name = folder.name.removeprefix("models--").replace("--", "/")
        blobs = [path for path in (folder / "blobs").glob("*") if path.is_file()]
        whole = name in complete and not any(path.suffix == ".incomplete" for path in blobs)
        found.append(Cached(name, sum(path.stat().st_size for path in blobs), whole))
    return found


def delete(name: str) -> Cached:
    """Delete a model from the hub's cache. Raises UsageError if it is not there."""
    from huggingface_hub import constants

    repository = (repository_of(name) or (name, ""))[0]
    there = {item.repository: item for item in cached()}
    if repository not in there:
        raise UsageError(f"{name[:80]}: not in the cache ({', '.join(there) or 'which is empty'})")
    shutil.rmtree(_folder(repository, constants.HF_HUB_CACHE), ignore_errors=True)
    return there[repository]


def _listing(repository: str, revision: str) -> tuple[dict[str, Any], str, Exception | None]:
    """Files of a repository by path, and the commit that has them; if the hub does not answer, those of the last
    download, no commit, and the error. Raises CheckpointError for a commit that cannot be one."""
    from huggingface_hub import HfApi, get_cached_repo_tree
    from huggingface_hub.errors import (
        CachedRepoTreeNotFoundError,
        HFValidationError,
        HTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        api = HfApi()  # model_info fails at once, where a listing would try for half a minute
        commit = str(api.model_info(repository, revision=revision).sha)
        if not GIT.fullmatch(commit):
            raise CheckpointError(f"{HUB}{repository}: expected a commit of 40 hex digits, the hub says {commit!r:.80}")
        return _by_path(api.list_repo_tree(repository, recursive=True, revision=commit)), commit, None
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError):
        raise
    except (HTTPError, ConnectionError, KeyError, ValueError) as error:
        if isinstance(error, KeyError | ValueError):  # from a network's login page, for one
            error = ConnectionError("another server answers in its place")
        try:
            return _by_path(get_cached_repo_tree(repository, revision=revision)), "", error
        except CachedRepoTreeNotFoundError:
            return {}, "", error


def _by_path(entries: Iterable[Any]) -> dict[str, Any]:
    from huggingface_hub.hf_api import RepoFile

    return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}


def _weights(top: list[str], names: tuple[str, ...], suffix: str | None) -> list[str]:
    """The files of the first of `names` that is there, shards included, or all with the suffix."""
    for name in names:
        if name in top:
            stem, ending = name.removesuffix(".index.json").rsplit(".", 1)
            shards = [path for path in top if fnmatchcase(path, f"{stem}-*-of-*.{ending}")]
            return [name, *shards] if name.endswith(".index.json") else [name]
    return [path for path in top if suffix and path.endswith(suffix)]


def _fetch(repository: str, commit: str, file: Any, check: bool) -> Path:
    """Download one file to its place in the cache, which is returned: its name is the file's hash. huggingface_hub
    checks the size alone, and starts a file over in another process. Raises CheckpointError for what is no hash: it
    could be another path."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import WeakFileLock, build_hf_headers

    digest, size = (file.lfs.sha256, file.lfs.size) if file.lfs else (file.blob_id, file.size)
    if not (SHA256 if file.lfs else GIT).fullmatch(str(digest)):
        raise CheckpointError(f"{HUB}{repository}: {file.path}: expected a hash of {64 if file.lfs else 40} hex digits,"
                              f" the hub says {digest!r:.80}")  # fmt: skip
    folder = _folder(repository, constants.HF_HUB_CACHE)
    blob, part = folder / "blobs" / digest, folder / "blobs" / f"{digest}.incomplete"
    whole = lambda: blob.exists() and (not check or _hash(blob, size, bool(file.lfs)) == digest)
    if whole():  # before the lock, which a cache of another user has no place for
        return blob
    lock = Path(constants.HF_HUB_CACHE) / ".locks" / folder.name / f"{digest}.lock"  # huggingface_hub's own
    for place in (blob, lock):
        place.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if whole():  # by another process
            return blob
        blob.unlink(missing_ok=True)
        done = part.stat().st_size if part.exists() and file.lfs else 0  # small files are text, which may come zipped
        if done > size or not file.lfs:
            part.unlink(missing_ok=True)
            done = 0
        with part.open("ab") as out:
            http_get(
                hf_hub_url(repository, file.path, revision=commit), out, resume_size=done, expected_size=size,
                headers=build_hf_headers(), displayed_filename=file.path, tqdm_class=None if file.lfs else _silent(),
            )  # fmt: skip
        if _hash(part, size, bool(file.lfs)) != digest:
            part.unlink()
            raise CheckpointError(f"{HUB}{repository}: {file.path} came damaged (its hash differs) and was deleted; "
                                  "download it again")  # fmt: skip
        part.replace(blob)
    return blob


def _link(blob: Path, commit: str, name: str) -> None:
    """Name a file in the snapshot of a commit. Trap: huggingface_hub would link to what a header of the hub says."""
    link = blob.parents[1] / "snapshots" / commit / name
    if link.exists() and (link.samefile(blob) or not link.is_symlink()):
        return
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # on a disk without links huggingface_hub copies
        link.symlink_to(os.path.relpath(blob, link.parent))


def _check(where: str, folder: Path, pickled: bool) -> None:
    """Raise CheckpointError for a file of a cached snapshot that differs from its hash, the name of what it links."""
    for path in wanted([path.relative_to(folder).as_posix() for path in folder.rglob("*.*")], pickled):
        blob = (folder / path).resolve()
        large = bool(SHA256.fullmatch(blob.name))
        if (large or GIT.fullmatch(blob.name)) and _hash(blob, blob.stat().st_size, large) != blob.name:
            raise CheckpointError(f"{where}: {path} is damaged in the cache (its hash differs); go online and download "
                                  "it again")  # fmt: skip


def _name(repository: str, revision: str, commit: str) -> None:
    """Record the commit of a branch or tag, as huggingface_hub does, for the time without the hub."""
    from huggingface_hub import constants

    name = _folder(repository, constants.HF_HUB_CACHE) / "refs" / revision
    if revision != commit and not (name.is_file() and name.read_text() == commit):
        with contextlib.suppress(OSError):  # of a cache that can only be read
            name.parent.mkdir(parents=True, exist_ok=True)
            write_whole(name, commit.encode())


def _hash(path: Path, size: int, large: bool) -> str:
    """sha256 of a large file, git's object id of another."""
    state = hashlib.sha256() if large else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            state.update(block)
    return state.hexdigest()


def _no_answer(error: BaseException) -> str:
    """Problem of a hub without an answer, and what to do."""
    if (response := getattr(error, "response", None)) is None:
        return f"the hub cannot be reached ({_cause(error)}); go online and run it again, or give its folder"
    if response.status_code == 401:
        return f"the hub refused the token, or wants one ({_cause(error)}); set HF_TOKEN to a valid token"
    wait = response.headers.get("retry-after", "")[:40]
    return f"the hub refused ({_cause(error)}); run it again {f'after {wait} s' if wait.isdigit() else 'later'}"


def _cause(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _folder(repository: str, cache: str) -> Path:
    return Path(cache) / f"models--{repository.replace('/', '--')}"


def _silent() -> type:
    from tqdm import tqdm

    class Silent(tqdm):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **{**kwargs, "disable": True})

    return Silent
