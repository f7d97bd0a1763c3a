"""Files of a client beside the graphs: settings, `tokenizer.json`, mel filters and a program of 60 lines."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from multimodal.export import clients
from multimodal.models.captioner import VisionEncoderDecoder
from multimodal.models.clip import CLIP
from multimodal.models.conformer import ConformerCTC
from multimodal.models.text import TextTransformer
from multimodal.models.vit import ViT
from multimodal.models.whisper import Whisper
from multimodal.tasks.classify.head import head_labels, head_scores
from multimodal.tasks.encode.prompts import prompts_of
from multimodal.tasks.text.generate import end_ids
from multimodal.tasks.transcribe.whisper.decode import model_and_tokenizer
from multimodal.tokens.audio.log_mel import (
    BANK_FFT,
    BANK_FLOOR,
    BANK_MEAN,
    BANK_SCALE,
    HOP,
    WINDOW,
    mel_filters,
)
from multimodal.tokens.image.preprocessing import Preprocessing
from multimodal.tokens.text.hub.recognizers import LetterTokenizer
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.weights.encode import padding_is_free
from multimodal.weights.folder import Checkpoint

TEN = math.log(10)
UNLIMITED = 1e9


def write_client(checkpoint: Checkpoint, folder: Path) -> dict[str, Any]:
    """Write the client's files; return its settings, {} for a model that no client of ours serves."""
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    pipeline = None if tokenizer is None else tokenizer.pipeline()
    if pipeline is not None:
        (folder / "tokenizer.json").write_text(json.dumps(pipeline, ensure_ascii=False))
    if isinstance(model, ViT | CLIP):
        client, settings = "images", _image_settings(checkpoint)
        usable = "image" in settings and (pipeline is not None if isinstance(model, CLIP) else "labels" in settings)
    else:
        client, settings = "texts", _text_settings(checkpoint)
        usable = pipeline is not None and bool(settings.keys() - {"blank", "vocabulary"})
    if not usable:
        return settings
    if "audio" in settings:
        np.save(folder / "mel.npy", mel_filters(settings["audio"]["bands"], settings["audio"]["fft"]).numpy())
    shutil.copyfile(Path(clients.__file__).with_name(f"{client}.py"), folder / "client.py")
    return settings | {"client": "client.py"}


def _image_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    model, record = checkpoint.model, checkpoint.preprocessing
    made: dict[str, Any] = {"image": _edges(record)} if record is not None and _plain(record) else {}
    if isinstance(model, ViT):
        labels = {"labels": head_labels(checkpoint)} if checkpoint.card.get("labels") and model.config.classes else {}
        return made | labels | {"scores": head_scores(checkpoint)}
    bias = 0.0 if model.logit_bias is None else model.logit_bias.item()
    made |= {"scores": model.config.loss, "logit_scale": model.logit_scale.exp().item(), "logit_bias": bias}
    if (tokenizer := checkpoint.tokenizer) is None:
        return made
    templates = checkpoint.card.get("templates", "clip7")
    known = isinstance(templates, dict)  # prompts of the labels that the model knows
    length = 0 if padding_is_free(model.config) else tokenizer.context or model.config.text.context
    return made | _around(tokenizer) | {"templates": ["{}"] if known else prompts_of(["{}"], templates)[0],
                                        "length": length}  # fmt: skip


def _plain(record: Preprocessing) -> bool:
    """True if the client can do it."""
    square = record.size[0] == record.size[1]
    return (
        record.tiling is None
        and record.offset == "round"
        and (record.resize == "squash" or (record.resize == "shortest" and square))
    )


def _edges(record: Preprocessing) -> dict[str, Any]:
    return record.to_dict() | {"edges": [math.floor(edge / record.crop) for edge in record.size]}


def _around(tokenizer: Tokenizer) -> dict[str, Any]:
    """Ids around a text."""
    start, end = tokenizer.frame
    return {"before": start, "after": end, "pad": tokenizer.pad_id}


def _text_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    model = checkpoint.model
    if isinstance(model, ConformerCTC):
        return _recognizer_settings(model, checkpoint.tokenizer)
    if checkpoint.tokenizer is None or isinstance(model, VisionEncoderDecoder):
        return {}
    if isinstance(model, Whisper):
        return _whisper_settings(checkpoint)
    if isinstance(model, TextTransformer) and model.config.causal and "pooling" not in checkpoint.card:
        limit = min(model.config.limit or math.inf, model.config.limit_from(1) or math.inf)
        return _around(checkpoint.tokenizer) | {"ends": end_ids(checkpoint), "never": [], "never_first": [],
                                                "context": min(limit, model.config.context)}  # fmt: skip
    return {}


def _recognizer_settings(model: ConformerCTC, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """`blank`: the column of CTC's blank. `vocabulary`: tokens of all columns, where there is no `tokenizer.json`."""
    row = model.config.blank if model.config.blank_row is None else model.config.blank_row
    made: dict[str, Any] = {"blank": row}
    if isinstance(tokenizer, LetterTokenizer):
        made["vocabulary"] = [*tokenizer.tokens[:row], "<pad>", *tokenizer.tokens[row:]]
    known = tokenizer is not None and getattr(model.config.encoder, "features", None) == "fixed"
    return made | ({"audio": _bank(model.config.encoder.bands)} if known else {})


def _bank(bands: int) -> dict[str, Any]:
    """See `log_mel.filterbank`."""
    return {"bands": bands, "samples": WINDOW, "edge": 0, "frames": None, "fft": BANK_FFT, "floor": BANK_FLOOR,
            "range": UNLIMITED, "mean": BANK_MEAN, "scale": BANK_SCALE}  # fmt: skip


def _whisper_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """See `log_mel.log_mel`; a transcript without timestamps, in the card's language, or else in English."""
    model, tokenizer = model_and_tokenizer(checkpoint)
    frames = 2 * model.config.encoder.context
    own = checkpoint.card.get("language") or ("en" if "en" in tokenizer.languages else tokenizer.languages[0])
    prompt = tokenizer.sot_sequence(own if tokenizer.multilingual else None, timestamps=False)
    t = tokenizer
    never = [*t.non_speech_tokens(), t.transcribe, t.translate, t.sot, t.sot_prev, t.sot_lm, t.no_speech]
    languages = dict(zip(tokenizer.languages, tokenizer.language_tokens, strict=True)) if tokenizer.multilingual else {}
    return {
        "audio": {"bands": model.config.encoder.bands, "samples": frames * HOP, "edge": WINDOW // 2, "frames": frames,
                  "fft": WINDOW, "floor": 1e-10, "range": 8 * TEN, "mean": -4 * TEN, "scale": 4 * TEN},
        "prompt": list(prompt), "languages": languages, "ends": [tokenizer.eot], "never": sorted(set(never)),
        "never_first": [*tokenizer.encode(" "), tokenizer.eot], "context": model.config.decoder.context,
    }  # fmt: skip
