"""Malformed FAISS files are refused before FAISS maps them and crashes."""

import pytest

from multimodal.errors import CheckpointError
from multimodal.tasks.retrieve.faiss_file import check_faiss
from tests.helpers.processes import faiss_fuzz

FILE = faiss_fuzz.original()


def test_built_files_pass_and_truncated_ones_are_refused(tmp_path):
    path = tmp_path / "search.faiss"
    path.write_bytes(FILE)
    check_faiss(path, faiss_fuzz.COUNT, faiss_fuzz.WIDTH)
    for count, width in ((faiss_fuzz.COUNT + 1, faiss_fuzz.WIDTH), (faiss_fuzz.COUNT, 2 * faiss_fuzz.WIDTH)):
        with pytest.raises(CheckpointError, match=r"search\.faiss: damaged \(header: expected"):
            check_faiss(path, count, width)
    for size in range(1, len(FILE), len(FILE) // 40):
        path.write_bytes(FILE[:size])
        with pytest.raises(CheckpointError, match=r"search\.faiss: damaged"):
            check_faiss(path, faiss_fuzz.COUNT, faiss_fuzz.WIDTH)
    path.write_bytes(FILE + b"\0")
    with pytest.raises(CheckpointError, match="end of the file"):
        check_faiss(path, faiss_fuzz.COUNT, faiss_fuzz.WIDTH)
