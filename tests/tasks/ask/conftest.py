"""A tiny any-to-text checkpoint, and its folder."""

from pathlib import Path

import pytest

from multimodal.weights.folder import Checkpoint, save_folder
from tests.helpers.data.chats import checkpoint


@pytest.fixture(scope="session")
def tiny() -> Checkpoint:
    return checkpoint()


@pytest.fixture(scope="session")
def folder(tmp_path_factory, tiny) -> Path:
    path = tmp_path_factory.mktemp("ask") / "tiny"
    save_folder(tiny, path)
    return path
