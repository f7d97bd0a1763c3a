"""Access control for lists, which may come from anyone: by default, files in the list's own folder alone."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from multimodal.errors import UsageError

# `pipe:` starts webdataset's commands: as a URL of an unknown scheme it is refused
REMOTE = re.compile(r"pipe:|[a-z][a-z0-9+.-]+://", re.IGNORECASE)
WEB = frozenset({"http", "https"})
STORES = frozenset({"s3", "gs", "gcs", "az", "abfs", "hf", "memory"})  # read by fsspec within this process
NAMED = re.compile(r"([a-z][a-z0-9+.-]*://)?[^\s/*?@]+", re.IGNORECASE)
SHOWN = 80  # letters of a path in a message


@dataclass(frozen=True)
class Trust:
    """Locations that a list's rows may name besides files in its folder."""

    trust_paths: bool = False
    """allow lists to name any file: absolute paths, and paths or links that leave the list's folder"""
    remote: tuple[str, ...] = ()
    """hosts that lists may name in URLs: HOST or HOST:PORT of http and https, s3://BUCKET of a store; an internal
    address must be named itself, also if a host resolves to it"""

    def __post_init__(self):
        if wrong := [host for host in self.remote if not NAMED.fullmatch(host)]:
            raise UsageError(f"remote {wrong[0]!r}: not a host, such as example.org or s3://bucket")

    def placed(self, media: str, base: str) -> tuple[str, str]:
        """Resolve a row's `media` in a list in the folder or below the URL `base`; return the path or URL and why it is
        refused. Does not touch the file system: `strays` checks links when the file is opened."""
        try:
            os.fsencode(media)
        except UnicodeEncodeError:
            return media, f"a lone surrogate in a path ({media[:SHOWN]!r})"
        if is_remote(media):
            return media, "" if below_url(media, base) else self.refuses_url(media)
        if "\0" in media:
            return media, f"NUL in a path ({media[:SHOWN]!r})"
        if is_remote(base) and not os.path.isabs(media):
            url = f"{base}/{media}"
            return url, "" if below_url(url, base) or self.trust_paths else _leaves(media)
        path = media if base == "." else os.path.join(base, media)
        inside = not is_remote(base) and _inside(os.path.abspath(path), os.path.abspath(base))
        return path, "" if inside or self.trust_paths else _leaves(media)

    def refuses_url(self, url: str) -> str:
        """Return the reason for not fetching a URL of a list."""
        scheme = url.partition(":")[0].lower()
        if scheme not in WEB | STORES:
            return f"{scheme}: URLs in a list are not read ({url[:SHOWN]!r})"
        host = host_of(url)
        if host is None:
            return f"not a URL that can be read ({url[:SHOWN]!r})"
        if host & self.hosts():
            return ""
        name = max(host, key=len) if scheme in STORES else min(host, key=len)
        return f"URLs in a list are only fetched from named hosts ({url[:SHOWN]!r}; --remote {name} allows it)"

    def hosts(self) -> set[str]:
        return {host.lower().replace("[", "").replace("]", "") for host in self.remote}

    def strays(self, path: str, folders: Sequence[str]) -> str:
        """Return the reason for not opening a file of a list: a link that leads out of the resolved `folders`."""
        real = os.path.realpath(path)
        if self.trust_paths or any(_inside(real, folder) for folder in folders):
            return ""
        return f"a link leads out of the folder of the list ({real[:SHOWN]!r}; --trust_paths allows it)"


OWN_FOLDER = Trust()


def is_remote(data: str) -> bool:
    return bool(REMOTE.match(data))


def host_of(url: str) -> set[str] | None:
    """Return the names by which `--remote` may allow a URL's host; None for an invalid URL."""
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or ""), parts.port
    except ValueError:
        return None
    if not host:
        return None
    scheme = parts.scheme.lower()
    if scheme in STORES:
        return {f"{scheme}://{parts.netloc.lower()}"}
    names = {host, f"{scheme}://{host}"}
    return names | {f"{name}:{port}" for name in names} if port else names


def below_url(url: str, base: str) -> bool:
    """Return True if a URL lies below another, with no `..` in any encoding."""
    if not is_remote(base) or not url.startswith(f"{base}/"):
        return False
    return not re.search(r"(^|/|%2f|\\|%5c)(\.|%2e){2}($|/|%2f|\\|%5c)", url[len(base) + 1 :], re.IGNORECASE)


def _leaves(media: str) -> str:
    kind = "an absolute path" if os.path.isabs(media) else "a path"
    return f"{kind} outside of the folder of the list ({media[:SHOWN]!r}; --trust_paths allows it)"


def _inside(path: str, folder: str) -> bool:
    return path.startswith(folder.rstrip("/") + "/")
