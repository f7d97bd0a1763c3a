"""Options of the server."""

from pathlib import Path
from typing import Any

from multimodal.errors import UsageError
from multimodal.inference.options import MachineOptions
from multimodal.system.options import OptionSet, option

DEFAULTS = ("asr-conformer-en", "clip-vit-16", "sentence-mini", "gpt-mini", "translator-mini", "any-mini")
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def _pairs(value: Any) -> tuple[tuple[str, str], ...]:
    """NAME=VALUE pairs."""
    found = []
    for one in (value,) if isinstance(value, str) else value:
        name, equals, text = one.partition("=") if isinstance(one, str) else ("", "", "")
        if not (name and equals and text):
            raise UsageError(f"expected NAME=VALUE (got {one!r:.40})")
        found.append((name, text))
    return tuple(found)


def _strings(value: Any) -> tuple[str, ...]:
    found = (value,) if isinstance(value, str) else tuple(value)
    for one in found:
        if not isinstance(one, str) or not one.strip():
            raise UsageError(f"must be texts that are not empty (got {one!r:.40})")
    return found


def _hosts(value: Any) -> tuple[str, ...]:
    from multimodal.data.remote.trust import NAMED  # needs dataclasses, which are slow for --help

    found = _strings(value)
    if wrong := [one for one in found if not NAMED.fullmatch(one) or "://" in one]:
        raise UsageError(f"must be hosts, such as example.org or 10.0.0.7:8080 (got {wrong[0]!r:.60})")
    return found


class ServeOptions(OptionSet):
    """`models`: the first one that can do a task is the default of that task. `alias`: other names of models, for
    clients that insist on one. `index`: image indexes for /v1/search by name."""

    host: str = option("127.0.0.1", "address to listen on; others than loopback need --api_key", "HOST")
    port: int = option(8000, "0: any free one", "PORT", low=0, high=65535)
    models: tuple[str, ...] = option(DEFAULTS, f"names or folders (default: {' '.join(DEFAULTS)})", "MODEL",
                                     read=_strings)  # fmt: skip
    alias: tuple[tuple[str, str], ...] = option((), "another name of a model, such as whisper-1=whisper-base",
                                                "NAME=MODEL", read=_pairs)  # fmt: skip
    index: tuple[tuple[str, str], ...] = option((), "image index for searches", "NAME=FOLDER", read=_pairs)
    api_key: tuple[str, ...] = option((), "key that clients must send; several may be given", "KEY", read=_strings)
    api_key_file: str | None = option(None, "file with a key on each line, which a list of processes does not show",
                                      "FILE")  # fmt: skip
    cors: tuple[str, ...] = option((), "origins whose pages may call the server (default: none)", "ORIGIN",
                                   read=_strings)  # fmt: skip
    allow_urls: tuple[str, ...] = option((), "hosts whose URLs are read for clients; an internal address must be named "
                                         "itself (default: none)", "HOST", read=_hosts)  # fmt: skip
    max_upload_mb: float = option(1024.0, "largest request", "MB", low=0, above=True)
    max_megapixels: float = option(50.0, "largest image", "MP", low=0, above=True)
    queue: int = option(64, "requests that may wait for a model; more are refused with 429", "N", low=1)
    batch_size: int = option(8, "recordings, images or texts that share a batch", "N", low=1, high=1024)
    seconds: float = option(3600.0, "longest time of a request", "SECONDS", low=0, above=True)
    streams: int = option(32, "live recordings at once", "N", low=1)
    workers: int = option(1, "processes, each with its own models; /metrics adds up their counts", "N", low=1, high=256)
    page: bool = option(True, "the page at /")
    device: str | None = MachineOptions.device.but("auto")
    compute_type: str = MachineOptions.compute_type
    threads: int | None = MachineOptions.threads.but(None, help="CPU threads of each process (default: torch's)")

    def known_keys(self) -> tuple[str, ...]:
        """The keys of clients. Raises UsageError for a file that cannot be read or has none."""
        if self.api_key_file is None:
            return self.api_key
        try:
            lines = Path(self.api_key_file).read_text().split()
        except (OSError, ValueError) as error:
            cause = error.strerror if isinstance(error, OSError) else error
            raise UsageError(f"{self.api_key_file}: cannot be read ({cause})", argument="api_key_file") from None
        if not lines:
            raise UsageError(f"{self.api_key_file}: has no key", argument="api_key_file")
        return (*self.api_key, *lines)

    def check(self) -> None:
        if not self.known_keys() and self.host not in LOOPBACK:
            raise UsageError(f"{self.host}: an API key is needed, as other machines can reach it", argument="host")
        for alias, name in self.alias:
            if name not in self.models:
                raise UsageError(f"{alias}={name}: {name} is not among models ({', '.join(self.models)})",
                                 argument="alias")  # fmt: skip
