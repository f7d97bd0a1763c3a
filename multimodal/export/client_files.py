"""Files of a client beside the graphs: settings, `tokenizer.json`, mel filters and a program of about 80 lines."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from multimodal.export import clients
from multimodal.export.hf.files import control_names, write_pieces
from multimodal.models.captioner import VisionEncoderDecoder
from multimodal.models.clip import CLIP
from multimodal.models.conformer import ConformerCTC
from multimodal.models.encoder_decoder import EncoderDecoder
from multimodal.models.text import TextTransformer
from multimodal.models.vit import ViT
from multimodal.models.whisper import Whisper
from multimodal.tasks.classify.classifier import templates_of
from multimodal.tasks.classify.head import head_labels, head_scores
from multimodal.tasks.encode.prompts import prompts_of
from multimodal.tasks.encode.search_defaults import BANS, banned_tokens, search_defaults
from multimodal.tasks.text.embed import is_language_model
from multimodal.tasks.text.generate import end_ids
from multimodal.tasks.text.options import GenerateOptions
from multimodal.tasks.transcribe.options import options_for
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
    """Write the client's files; return settings of the model, also of one that no client of ours serves."""
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    pipeline = None if tokenizer is None else tokenizer.pipeline()
    if pipeline is not None:
        (folder / "tokenizer.json").write_text(json.dumps(pipeline, ensure_ascii=False))
    elif tokenizer is not None:
        write_pieces(checkpoint, folder)
    settings = _shared(checkpoint)
    if isinstance(model, ViT | CLIP):
        client, settings = "images", settings | _image_settings(checkpoint)
        known = pipeline is not None if isinstance(model, CLIP) else "labels" in settings
        usable = known and "edges" in settings.get("image", ())
    else:
        client, settings = "texts", settings | _text_settings(checkpoint)
        continues = isinstance(model, TextTransformer) and "ends" in settings
        # the client is greedy and forbids nothing
        continues = continues and not search_defaults(checkpoint, {}, GenerateOptions)
        continues = continues and not any(banned_tokens(checkpoint, name) for name in BANS)
        usable = pipeline is not None and (continues or "audio" in settings)
    if not usable:
        return settings
    if "audio" in settings:
        np.save(folder / "mel.npy", mel_filters(settings["audio"]["bands"], settings["audio"]["fft"]).numpy())
    shutil.copyfile(Path(clients.__file__).with_name(f"{client}.py"), folder / "client.py")
    return settings | {"client": "client.py"}


def _shared(checkpoint: Checkpoint) -> dict[str, Any]:
    """Steps of images, `edges` before the crop if a client can do all; ids around a text, between the two of a pair, of
    a masked and of control tokens, and the longest text with them. A source of a translator begins with a language in
    place of bos."""
    model, tokenizer, record = checkpoint.model, checkpoint.tokenizer, checkpoint.preprocessing
    made: dict[str, Any] = {}
    if record is not None:
        edges = [math.floor(edge / record.crop) for edge in record.size]
        made["image"] = record.to_dict() | ({"edges": edges} if _plain(record) else {})
    if tokenizer is None or isinstance(model, ConformerCTC | Whisper):
        return made
    start, end = tokenizer.frame
    if isinstance(model, TextTransformer) and not model.config.causal:
        made |= {"between": end * tokenizer.pair_ends, "second_segment": tokenizer.pair_segment}
    elif isinstance(model, TextTransformer) and not tokenizer.puts_end:
        end = []  # it writes its own, and vectors are made without
    translates = isinstance(model, EncoderDecoder) and tokenizer.language_ids
    text = next(getattr(model.config, name) for name in ("text", "decoder", "context") if hasattr(model.config, name))
    return made | {"before": [] if translates else start, "after": end, "pad": tokenizer.pad_id,
                   "mask": tokenizer.mask_id, "control": control_names(tokenizer),
                   "context": tokenizer.length_in(getattr(text, "context", text))}  # fmt: skip


def _image_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    model = checkpoint.model
    if isinstance(model, ViT):
        labels = {"labels": head_labels(checkpoint)} if checkpoint.card.get("labels") and model.config.classes else {}
        return labels | {"scores": head_scores(checkpoint)}
    bias = 0.0 if model.logit_bias is None else model.logit_bias.item()
    made = {"scores": model.config.loss, "logit_scale": model.logit_scale.exp().item(), "logit_bias": bias}
    if (tokenizer := checkpoint.tokenizer) is None:
        return made
    templates = templates_of(checkpoint)
    if isinstance(templates, dict):  # prompts of each label
        labels = [label.strip() for label in templates]
        prompts: Any = dict(zip(labels, prompts_of(labels, templates), strict=True))
    else:
        prompts = prompts_of(["{}"], templates)[0]
    length = 0 if padding_is_free(model.config) else tokenizer.length_in(model.config.text.context)
    return made | {"templates": prompts, "length": length}


def _plain(record: Preprocessing) -> bool:
    """True if the client can do it."""
    square = record.size[0] == record.size[1]
    return record.tiling is None and (record.resize == "squash" or (record.resize == "shortest" and square))


def _text_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    model = checkpoint.model
    if isinstance(model, ConformerCTC):
        return _recognizer_settings(model, checkpoint.tokenizer)
    if (tokenizer := checkpoint.tokenizer) is None:
        return {}
    if isinstance(model, Whisper):
        return _whisper_settings(checkpoint)
    made: dict[str, Any] = {"ends": end_ids(checkpoint), "never": [], "never_first": []}
    if isinstance(model, EncoderDecoder):
        never = {"never": [tokenizer.pad_id]} if tokenizer.pad_id != tokenizer.eos_id else {}
        return made | never | {
            "prompt": [model.config.start_id], "source_context": model.config.encoder.context,
            "languages": dict(tokenizer.language_ids), "language_in_source": tokenizer.language_in_source,
        }  # fmt: skip
    if isinstance(model, VisionEncoderDecoder):
        return made | {"prompt": tokenizer.frame[0]}
    if is_language_model(checkpoint):
        limit = min(model.config.limit or math.inf, model.config.limit_from(1) or math.inf)
        return made | {"context": min(limit, model.config.context)}
    return {}


def _recognizer_settings(model: ConformerCTC, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """`blank`: the column of CTC's blank. `vocabulary`: tokens of all columns, where there is no `tokenizer.json`."""
    row = model.config.blank if model.config.blank_row is None else model.config.blank_row
    made: dict[str, Any] = {"blank": row}
    if isinstance(tokenizer, LetterTokenizer):
        made["vocabulary"] = [*tokenizer.tokens[:row], "<pad>", *tokenizer.tokens[row:]]
        made["clean_up_tokenization_spaces"] = tokenizer.clean
    known = tokenizer is not None and getattr(model.config.encoder, "features", None) == "fixed"
    return made | ({"audio": _bank(model.config.encoder.bands)} if known else {})


def _bank(bands: int) -> dict[str, Any]:
    """See `log_mel.filterbank`."""
    return {"bands": bands, "samples": WINDOW, "edge": 0, "frames": None, "fft": BANK_FFT, "floor": BANK_FLOOR,
            "range": UNLIMITED, "mean": BANK_MEAN, "scale": BANK_SCALE}  # fmt: skip


def _whisper_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """See `log_mel.log_mel`; a transcript without timestamps, in the card's language, or else in English."""
    (model, tokenizer), own = model_and_tokenizer(checkpoint), options_for(checkpoint, {})
    frames = 2 * model.config.encoder.context
    spoken = own.language or checkpoint.card.get("language")
    spoken = spoken or ("en" if "en" in tokenizer.languages else tokenizer.languages[0])
    prompt = tokenizer.sot_sequence(spoken if tokenizer.multilingual else None, own.task, timestamps=False)
    languages = dict(zip(tokenizer.languages, tokenizer.language_tokens, strict=True)) if tokenizer.multilingual else {}
    return {
        "audio": {"bands": model.config.encoder.bands, "samples": frames * HOP, "edge": WINDOW // 2, "frames": frames,
                  "fft": WINDOW, "floor": 1e-10, "range": 8 * TEN, "mean": -4 * TEN, "scale": 4 * TEN},
        "prompt": list(prompt), "languages": languages, "ends": [tokenizer.eot],
        "never": tokenizer.suppressed_tokens(own.suppress_tokens),
        "never_first": [*tokenizer.encode(" "), tokenizer.eot] if own.suppress_blank else [],
        "context": model.config.decoder.context, "most": own.sample_len or model.config.decoder.context // 2,
    }  # fmt: skip
