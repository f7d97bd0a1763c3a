"""Malformed FAISS files are refused before FAISS maps them and crashes."""

import struct

import numpy as np
import pytest

from multimodal.errors import CheckpointError
from multimodal.tasks.retrieve.faiss_file import check_faiss
from tests.helpers.processes import faiss_fuzz

FILES = faiss_fuzz.originals()


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_built_files_pass_and_truncated_ones_are_refused(kind, tmp_path):
    path = tmp_path / "search.faiss"
    path.write_bytes(FILES[kind])
    check_faiss(path, kind, faiss_fuzz.COUNT, faiss_fuzz.WIDTH)
    for count, width in ((faiss_fuzz.COUNT + 1, faiss_fuzz.WIDTH), (faiss_fuzz.COUNT, 2 * faiss_fuzz.WIDTH)):
        with pytest.raises(CheckpointError, match=r"search\.faiss: damaged \(header: expected"):
            check_faiss(path, kind, count, width)
    for size in range(1, len(FILES[kind]), len(FILES[kind]) // 40):
        path.write_bytes(FILES[kind][:size])
        with pytest.raises(CheckpointError, match=r"search\.faiss: damaged"):
            check_faiss(path, kind, faiss_fuzz.COUNT, faiss_fuzz.WIDTH)
    path.write_bytes(FILES[kind] + b"\0")
    with pytest.raises(CheckpointError, match="end of the file"):
        check_faiss(path, kind, faiss_fuzz.COUNT, faiss_fuzz.WIDTH)


@pytest.mark.parametrize("node", [-2, faiss_fuzz.COUNT, 2**31 - 1])
def test_a_link_out_of_the_graph_is_refused(node, tmp_path):
    data = bytearray(FILES["hnsw"])
    links = data.index(struct.pack("<i", -1) * 4)  # an empty place among the links
    data[links : links + 4] = np.int32(node).tobytes()
    (tmp_path / "search.faiss").write_bytes(data)
    with pytest.raises(CheckpointError, match="a link to node"):
        check_faiss(tmp_path / "search.faiss", "hnsw", faiss_fuzz.COUNT, faiss_fuzz.WIDTH)
