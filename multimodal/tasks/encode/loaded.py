"""Objects that load a model once and are called many times."""

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, ValuesView
from functools import wraps
from inspect import Parameter, signature
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch

from multimodal.data.remote.copies import fetch
from multimodal.errors import DataError, MultimodalError, UsageError, did_you_mean
from multimodal.inference.prepare import automatic_device, usable_device
from multimodal.system.config import required_model
from multimodal.system.files import shown
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load

Result = TypeVar("Result")
Model = str | Path | Checkpoint
OnError = Literal["return", "raise"]


def _keeping(init: Callable[..., None]) -> Callable[..., None]:
    """The constructor, which keeps its arguments in a form that repeats: iterators as lists, copies of containers.
    Raises UsageError for a name that it does not take."""
    _, *parameters = signature(init).parameters.values()
    known = [one.name for one in parameters]
    options = any(one.kind is Parameter.VAR_KEYWORD for one in parameters)  # which check their names

    @wraps(init)
    def keeping_init(self: "LoadedModel", *arguments: Any, **named: Any) -> None:
        if other := next((name for name in named if name not in known and not options), None):
            raise UsageError(f"option {other!r}: unknown{did_you_mean(other, known)} (known: {', '.join(known)})")
        if "_arguments" not in vars(self):  # a subclass's constructor has kept its own
            arguments, named = tuple(map(_kept, arguments)), {name: _kept(value) for name, value in named.items()}
            self._arguments, self._lock = (arguments, named), threading.RLock()
        init(self, *arguments, **named)

    return keeping_init


def _kept(value: Any) -> Any:
    if isinstance(value, Iterator | KeysView | ValuesView):
        return list(value)
    return copy.deepcopy(value) if isinstance(value, list | dict | set | np.ndarray) else value


class LoadedModel:
    """Base of the objects that load a model once and are called many times.

    An object owns its converted weights. It pickles as its constructor's arguments at that time (but for a Checkpoint,
    which pickles as it is now), so that another process loads its own; if it cannot, every use there raises the error.
    Calls from several threads are safe: they queue."""

    _arguments: tuple[tuple[Any, ...], dict[str, Any]]
    _lock: threading.RLock

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        if "__init__" in vars(cls):
            cls.__init__ = _keeping(cls.__init__)  # type: ignore[method-assign]

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (type(self), *self._arguments)

    def _queued(self, results: Iterator[Result]) -> Iterator[Result]:
        """Compute each result of a generator in the turn of the thread that asks for it."""
        while True:
            with self._lock:
                try:
                    result = next(results)
                except StopIteration:
                    return
            yield result


def _made(kind: type[LoadedModel], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    try:
        return kind(*arguments, **named)
    except MultimodalError as error:
        return _Unloaded(error)


class _Unloaded:
    """Stand-in for an object that cannot be loaded in this process. An error raised while unpickling would break a
    process pool, or hang it; this one becomes the error of the task."""

    def __init__(self, error: MultimodalError):
        self._error = error

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        raise self._error

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise self._error


def local(source: Any, urls: bool) -> Any:
    """The source, or the cached copy of an http or https URL. Raises DataError for a URL without `urls`."""
    if not isinstance(source, str) or not source.lower().startswith(("http://", "https://")):
        return source
    if not urls:
        raise DataError(f"{source[:80]}: URLs are read with urls=True")
    return fetch(source)


def loaded(model: Model | None, task: str) -> Checkpoint:
    """The checkpoint, loaded if it is a name or path; None is the default model of a task. Raises UsageError."""
    if model is None:
        model = required_model(task).model
    return model if isinstance(model, Checkpoint) else load(model, task=task)


def device_of(name: str | torch.device | None, checkpoint: Checkpoint) -> torch.device:
    """The device of `auto` (a GPU if there is one; a prepared model stays where it is), the named one, or for None the
    model's own. Raises UsageError."""
    own = next(checkpoint.model.parameters()).device
    if name is None or (name == "auto" and checkpoint.prepared is not None):
        return own
    if name == "auto":
        return automatic_device()
    return usable_device(name)


class Item(NamedTuple):
    """A source, its position, and the key under which its result is returned."""

    key: Any
    source: Any
    position: int


class Items:
    """Iterate the sources of a `…_many` call with their keys: with `keyed`, (key, source) pairs; else a path is its own
    key (unless strings are no `paths`), and any other source has its position.

    An exception of the caller's iterable, or an item that is no pair, ends the iteration; `finish` raises it, after the
    results of the items before."""

    def __init__(self, sources: Any, keyed: bool, paths: bool = True, name: str = "items"):
        # mappings and frames iterate over names
        if isinstance(sources, str | bytes | Path | Mapping) or hasattr(sources, "columns"):
            keys = "; with keys: mapping.items() and keyed=True" if isinstance(sources, Mapping) else ""
            raise UsageError(f"expected several items, as a list (got {shown(sources)}){keys}", argument=name)
        try:
            self.sources = iter(sources)
        except TypeError:
            raise UsageError(f"expected an iterable (got {shown(sources)})", argument=name) from None
        self.keyed, self.paths = keyed, paths
        self.failure: Exception | None = None

    def __iter__(self) -> Iterator[Item]:
        try:
            for position, source in enumerate(self.sources):
                if self.keyed:
                    yield _item(source, position)
                else:
                    key = source if self.paths and isinstance(source, str | Path) else position
                    yield Item(key, source, position)
        except Exception as error:
            self.failure = error

    def finish(self) -> None:
        if self.failure is not None:
            raise self.failure


def _item(pair: Any, position: int) -> Item:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise UsageError(f"item {position}: expected (key, source) (got {shown(pair)})")
    try:
        hash(pair[0])
    except TypeError:
        raise UsageError(f"item {position}: the key must be hashable (got {shown(pair[0])})") from None
    return Item(pair[0], pair[1], position)


def checked_results(
    results: Iterator[tuple[Any, Result | MultimodalError]], items: Items, on_error: OnError
) -> Iterator[tuple[Any, Result | MultimodalError]]:
    """Raise the first error with `on_error` "raise", and the failure of the caller's iterable at the end."""
    for key, result in results:
        if on_error == "raise" and isinstance(result, MultimodalError):
            raise result
        yield key, result
    items.finish()


def answered(
    items: Items, batch_size: int, read: Callable[[Item], Any], write: Callable[[list[Any]], Iterable[Result]]
) -> Iterator[Result | MultimodalError]:
    """Yield the result of each item, batch by batch: `write` gives those of all that `read` makes of a batch's items.
    An item that cannot be read gives its error."""
    remaining = iter(items)
    while batch := list(islice(remaining, batch_size)):
        prompts: list[Any] = []
        for item in batch:
            try:
                prompts.append(read(item))
            except MultimodalError as error:
                prompts.append(error)
        usable = [one for one in prompts if not isinstance(one, MultimodalError)]
        found = iter(write(usable) if usable else ())
        yield from (one if isinstance(one, MultimodalError) else next(found) for one in prompts)
    items.finish()


def check_on_error(on_error: str) -> None:
    if on_error not in ("return", "raise"):
        raise UsageError(f"must be return or raise (got {shown(on_error)})", argument="on_error")
