"""The compiled functions of decoders, and the structures that they take."""

import ctypes
from functools import cache
from pathlib import Path

from multimodal.system.compiled import load_compiled

NAMES = ("threads.h", "vectors.h", "linear.h", "attention.h", "step.cpp")
SOURCES = tuple(Path(__file__).with_name(name) for name in NAMES)
POINTER, NUMBER = ctypes.c_void_p, ctypes.c_int64


class LinearRecord(ctypes.Structure):
    """See `linear.h`, as for all structures."""

    _fields_ = (
        ("weight", POINTER), ("steps", POINTER), ("bias", POINTER), ("sums", POINTER), ("outputs", NUMBER),
        ("inputs", NUMBER),
    )  # fmt: skip


class NormRecord(ctypes.Structure):
    _fields_ = (("weight", POINTER), ("bias", POINTER), ("eps", ctypes.c_double), ("root", NUMBER))


MAPS = ("qkv", "out", "query", "cross_out", "gate", "up", "down")


class LayerRecord(ctypes.Structure):
    _fields_ = (
        ("norms", NormRecord * 3), *((name, LinearRecord) for name in MAPS), ("scale", ctypes.c_double),
        ("cross_scale", ctypes.c_double),
    )  # fmt: skip


class DecoderRecord(ctypes.Structure):
    _fields_ = (("layers", ctypes.POINTER(LayerRecord)), ("norm", NormRecord), ("head", LinearRecord), *(
        (name, NUMBER) for name in ("count", "width", "heads", "kv_heads", "head_width", "cross_heads", "cross_width",
                                    "activation")
    ))  # fmt: skip


class TokenRecord(ctypes.Structure):
    _fields_ = (*(
        (name, POINTER) for name in ("x", "logits", "keys", "values", "source_keys", "source_values", "starts", "bias",
                                     "cos", "sin", "seen", "capacities")
    ), *(
        (name, NUMBER) for name in ("rows", "length", "bias_capacity", "turns", "interleaved", "sources",
                                    "source_length", "source_halves", "threads")
    ))  # fmt: skip


class AttentionRecord(ctypes.Structure):
    """See `attention.h`."""

    _fields_ = (*((name, POINTER) for name in ("query", "key", "value", "mask", "mixed")), *(
        (name, NUMBER * size) for name, size in (("query_strides", 3), ("key_strides", 3), ("value_strides", 3),
                                                 ("mask_strides", 4))
    ), *(
        (name, NUMBER) for name in ("batch", "heads", "kv_heads", "queries", "keys", "width", "bytes", "causal")
    ), ("scale", ctypes.c_double))  # fmt: skip


@cache
def library() -> ctypes.CDLL | None:
    """The compiled functions, or None: see `load_compiled`."""
    found = load_compiled(SOURCES, "linear maps and decoding steps", "models compute without compiled maps")
    if found is not None:
        found.panel.argtypes, found.panel.restype = (NUMBER,), NUMBER
        found.linear.argtypes = (POINTER, POINTER, NUMBER, NUMBER, NUMBER, POINTER, NUMBER, NUMBER)
        found.attention.argtypes = (POINTER, NUMBER)
        found.norm.argtypes = (POINTER, POINTER, NUMBER, NUMBER, POINTER, NUMBER)
        found.step.argtypes = (POINTER, POINTER)
        found.best.argtypes = (POINTER, NUMBER, NUMBER, POINTER, POINTER)
        for function in (found.linear, found.norm, found.attention, found.step, found.best):
            function.restype = None
    return found
