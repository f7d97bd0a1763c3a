"""Images decoded ahead by threads: the same pixels in the same order, whatever breaks or ends early."""

import io
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from multimodal.errors import ImageError, UsageError
from multimodal.tasks.encode.images import ahead, batches, name_of, pixels_of
from multimodal.tokens.image import arrays
from multimodal.tokens.image.preprocessing import OPENAI_MEAN, OPENAI_STD, Preprocessing
from tests.helpers.processes.programs import LIMIT
from tests.helpers.spread import thin

SMALL = Preprocessing((16, 24), "shortest", "bicubic", OPENAI_MEAN, OPENAI_STD, 0, 0.9)


def encoded(seed: int, size: tuple[int, int] = (40, 30)) -> bytes:
    file = io.BytesIO()
    noise = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{number:02}.png" for number in range(11)]
    for number, path in enumerate(paths):
        path.write_bytes(encoded(number))
    return paths


@pytest.fixture(autouse=True)
def all_threads_end() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("workers", [1, 3, None])
@pytest.mark.parametrize("batch_size", [1, 2, 4, 11, 32])
def test_pixels_are_those_of_each_alone_in_order(files, batch_size, workers):
    found = list(batches(files, SMALL, batch_size, workers))
    assert [len(batch.read) for batch in found[:-1]] == [batch_size] * (len(found) - 1)
    assert [path for batch in found for path in batch.read] == files
    assert torch.equal(torch.cat([batch.pixels for batch in found]), pixels_of(files, SMALL))
    assert all(not batch.refused and len(batch.pixels) == len(batch.read) for batch in found)


@pytest.mark.parametrize("broken", [[0], [10], [4, 5, 6, 7], [1, 3, 9], list(range(11))])
def test_broken_images_are_told_and_the_others_go_on(files, broken):
    for number in broken:
        files[number].write_bytes(encoded(number)[:60])
    found = list(batches((str(path) for path in files), SMALL, 4, 2))
    good = [str(path) for number, path in enumerate(files) if number not in broken]
    assert [path for batch in found for path in batch.read] == good
    refused = [item for batch in found for item in batch.refused]
    assert [path for path, _ in refused] == [str(files[number]) for number in broken]
    for path, error in refused:
        assert isinstance(error, ImageError)
        assert str(error).startswith(path)
    pixels = torch.cat([batch.pixels for batch in found])
    assert torch.equal(pixels, pixels_of(good, SMALL) if good else torch.zeros(0, 3, 16, 24))


def test_nothing_given_and_every_kind_of_image(files):
    assert list(batches([], SMALL)) == []
    several = [files[0], str(files[0]), files[0].read_bytes(), Image.open(files[0]), Image.open(files[0]).convert("L")]
    (batch,) = batches(several, SMALL, 8)
    assert batch.read == several
    assert all(torch.equal(batch.pixels[0], pixels) for pixels in batch.pixels[1:4])
    assert [name_of(image) for image in several] == [*[str(files[0])] * 2, "<bytes>", str(files[0]), "<Image>"]


def test_batches_do_not_share_their_pixels(files):
    stream = batches(files, SMALL, 2, 2)
    first = next(stream)
    kept = first.pixels.clone()
    rest = [batch.pixels.fill_(7) for batch in stream]
    assert len(rest) == 5
    assert torch.equal(first.pixels, kept)


@pytest.mark.parametrize(("batch_size", "workers"), [(0, 1), (-1, None), (4, 0), (4, -2)])
def test_sizes_that_cannot_be_are_refused(files, batch_size, workers):
    with pytest.raises(UsageError, match="must be an integer of at least 1"):
        list(batches(files, SMALL, batch_size, workers))


def test_no_more_is_taken_than_two_batches_ahead(files):
    taken = []

    def given() -> Iterator[Path]:
        for path in files:
            taken.append(path)
            yield path

    stream = batches(given(), SMALL, 2, 1)
    assert taken == []
    next(stream)
    assert len(taken) == 6
    stream.close()
    assert len(taken) == 6


def test_given_up_early_nothing_more_is_begun():
    begun, first = [], threading.Event()

    def work(number: int) -> None:
        begun.append(number)
        assert first.wait(LIMIT)

    stream = ahead(range(100), work, 10, 2)
    next(stream)  # thirty are waiting, of which two have begun
    first.set()
    stream.close()
    assert len(begun) < 30


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_error_of_the_reader_of_the_batches_ends_the_threads(files, error):
    def reader() -> None:
        for _ in batches(files, SMALL, 2, 2):
            raise error

    with pytest.raises(error):
        reader()


def test_an_unexpected_error_is_that_images_own_and_the_others_are_read(files, monkeypatch):
    read = arrays.read_image

    def failing(path: Path) -> Image.Image:
        if path == files[5]:
            raise RuntimeError("a fault of the program")
        return read(path)

    monkeypatch.setattr(arrays, "read_image", failing)
    stream = batches(files, SMALL, 4, 2)
    assert next(stream).read == files[:4]
    second = next(stream)
    assert second.read == [files[4], *files[6:8]]
    ((refused, error),) = second.refused
    assert refused == files[5]
    assert str(error) == f"{files[5]}: RuntimeError: a fault of the program"
    assert isinstance(error.__cause__, RuntimeError)
    stream.close()


def test_an_error_of_what_gives_the_images_is_raised(files):
    def given() -> Iterator[Path]:
        yield from files[:3]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(batches(given(), SMALL, 1, 2))


def test_only_pixels_wait_for_the_model_not_images(monkeypatch):
    read, made = arrays.read_image, []

    def seen(data: bytes) -> Image.Image:
        image = read(data)
        made.append(weakref.ref(image))
        return image

    monkeypatch.setattr(arrays, "read_image", seen)
    stream = batches([encoded(number) for number in range(9)], SMALL, 3, 2)
    for _ in range(3):
        next(stream)
    assert [image() for image in made] == [None] * 9


def test_a_batch_larger_than_what_is_given_takes_no_room_for_the_rest(files):
    (batch,) = batches(iter(files), SMALL, 10**12)
    assert torch.equal(batch.pixels, pixels_of(files, SMALL))
    assert batch.pixels.untyped_storage().nbytes() == batch.pixels.nbytes
