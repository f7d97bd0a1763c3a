"""Repositories of the Hugging Face hub in its local cache: downloads that resume and are checked, listing, deletion."""

import hashlib
import os
import re
import shutil
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from multimodal.errors import CheckpointError, UsageError
from multimodal.weights.files.formats import CTRANSLATE2_NAME, PICKLED_NAMES, SAFE_NAMES
from multimodal.weights.hub.registry import find, near

HUB = "hf-hub:"
REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")
PARTS = ("*.json", "*.jinja", "*.txt", "*.model", "*.spm", "*.tiktoken")  # configurations, tokenizers, at the top
MODULE = re.compile(r"\d+_\w+/(config\.json|model\.safetensors)")  # of sentence-transformers
PICKLED_MODULE = re.compile(r"\d+_\w+/pytorch_model\.bin")


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
    the damaged ones again. Raises CheckpointError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = f"{HUB}{repository}"
    try:
        files, offline = _listing(repository, revision)
        files = {path: files[path] for path in wanted(files, pickled)}
        if offline is None:
            for file in files.values():
                _fetch(repository, revision, file, check)
        others = (*PICKLED_NAMES, "*.nemo") if pickled else ()
        patterns = list(files) or [*PARTS, "*.safetensors", CTRANSLATE2_NAME, *others]
        return Path(
            snapshot_download(
                repository,
                revision=revision,
                allow_patterns=patterns,
                tqdm_class=_silent(),
                local_files_only=offline is not None,
            )
        )
    except RevisionNotFoundError:
        raise CheckpointError(f"{where}: has no revision {revision[:80]} (the newest: {where}@main)") from None
    except RepositoryNotFoundError:
        names = ", ".join(near(repository, ()))
        raise CheckpointError(f"{where}: not on the hub, or not public{names and f' (near: {names})'}") from None
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{where}: not in the cache, and the hub cannot be reached ({_cause(offline or error)}); go online "
            "and run it again, or give a folder with its files"
        ) from None
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
    from huggingface_hub import constants, scan_cache_dir

    repository = (repository_of(name) or (name, ""))[0]
    there = {item.repository: item for item in cached()}
    if repository not in there:
        raise UsageError(f"{name[:80]}: not in the cache ({', '.join(there) or 'which is empty'})")
    scan = scan_cache_dir()
    revisions = [
        revision.commit_hash
        for repo in scan.repos
        if (repo.repo_type, repo.repo_id) == ("model", repository)
        for revision in repo.revisions
    ]
    scan.delete_revisions(*revisions).execute()
    shutil.rmtree(_folder(repository, constants.HF_HUB_CACHE), ignore_errors=True)  # what a stop has left
    return there[repository]


def _listing(repository: str, revision: str) -> tuple[dict[str, Any], Exception | None]:
    """Files of a repository by path; if the hub does not answer, those of the last download, and the error."""
    from huggingface_hub import HfApi, get_cached_repo_tree
    from huggingface_hub.errors import (
        CachedRepoTreeNotFoundError,
        HTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        api = HfApi()
        commit = api.model_info(
            repository, revision=revision
        ).sha  # at once, where a listing would try for half a minute
        return _by_path(api.list_repo_tree(repository, recursive=True, revision=commit)), None
    except (RepositoryNotFoundError, RevisionNotFoundError):
        raise
    except (HTTPError, ConnectionError) as error:
        try:
            return _by_path(get_cached_repo_tree(repository, revision=revision)), error
        except CachedRepoTreeNotFoundError:
            return {}, error


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


def _fetch(repository: str, revision: str, file: Any, check: bool) -> None:
    """Download one file to its place in the cache, whose name is its hash; huggingface_hub checks the size alone, and
    starts a file over in another process."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import WeakFileLock, build_hf_headers

    digest, size = (file.lfs.sha256, file.lfs.size) if file.lfs else (file.blob_id, file.size)
    folder = _folder(repository, constants.HF_HUB_CACHE)
    blob, part = folder / "blobs" / digest, folder / "blobs" / f"{digest}.incomplete"
    lock = Path(constants.HF_HUB_CACHE) / ".locks" / folder.name / f"{digest}.lock"  # huggingface_hub's own
    for place in (blob, lock):
        place.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if blob.exists():
            if not check or _hash(blob, size, bool(file.lfs)) == digest:
                return
            blob.unlink()
        done = part.stat().st_size if part.exists() and file.lfs else 0  # small files are text, which may come zipped
        if done > size or not file.lfs:
            part.unlink(missing_ok=True)
            done = 0
        with part.open("ab") as out:
            http_get(
                hf_hub_url(repository, file.path, revision=revision), out, resume_size=done, expected_size=size,
                headers=build_hf_headers(), displayed_filename=file.path, tqdm_class=None if file.lfs else _silent(),
            )  # fmt: skip
        if _hash(part, size, bool(file.lfs)) != digest:
            part.unlink()
            raise CheckpointError(f"{HUB}{repository}: {file.path} came damaged (its hash differs) and was deleted; "
                                  "download it again")  # fmt: skip
        part.replace(blob)


def _hash(path: Path, size: int, large: bool) -> str:
    """sha256 of a large file, git's object id of another."""
    state = hashlib.sha256() if large else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            state.update(block)
    return state.hexdigest()


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
