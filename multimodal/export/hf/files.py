"""Files beside config.json and the weights: tokenizer, image processor, speech features, generation."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multimodal.models.encoder_decoder import EncoderDecoder
from multimodal.models.text import TextTransformer
from multimodal.models.whisper import Whisper
from multimodal.tasks.text.generate import end_ids
from multimodal.tasks.transcribe.options import options_for
from multimodal.tokens.audio.log_mel import HOP, RATE, WINDOW
from multimodal.tokens.image.preprocessing import Preprocessing
from multimodal.tokens.text.bytepair import SPECIALS, BytePairTokenizer
from multimodal.tokens.text.clip import CLIPTokenizer
from multimodal.tokens.text.hub.added import ADDED
from multimodal.tokens.text.hub.pipeline import with_control
from multimodal.tokens.text.sentencepiece import SentencePieceTokenizer, SigLIPText
from multimodal.tokens.text.t5 import T5Text
from multimodal.tokens.text.tiktokens import GPT2Tokenizer, WhisperTokenizer
from multimodal.tokens.text.tokenizer import RECORD, Tokenizer
from multimodal.tokens.text.translation import PiecesTokenizer
from multimodal.tokens.text.wordpiece import WordPieceTokenizer
from multimodal.weights.card import SEARCH
from multimodal.weights.folder import Checkpoint
from multimodal.weights.speech.whisper import TRANSCRIBE_OPTIONS

CLASSES = {WordPieceTokenizer: "BertTokenizer", CLIPTokenizer: "CLIPTokenizer", WhisperTokenizer: "WhisperTokenizer",
           GPT2Tokenizer: "GPT2Tokenizer"}  # fmt: skip
CLIP_ENDS = {"<|startoftext|>": 49406, "<|endoftext|>": 49407}
RESAMPLE = {"bilinear": 2, "bicubic": 3, "lanczos": 1}
ROLES = {"bos_token": "bos_id", "eos_token": "eos_id", "pad_token": "pad_id", "unk_token": "unknown_id",
         "mask_token": "mask_id"}  # fmt: skip
UNKNOWN = ("<unk>", "[UNK]")  # of byte-level vocabularies, which never yield it


def write_json(path: Path, record: dict[str, Any] | list[Any]) -> None:
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def control_names(tokenizer: Tokenizer) -> dict[str, int]:
    """Names and ids of control tokens."""
    if isinstance(tokenizer, BytePairTokenizer):
        languages = {f"<{code}>": i for code, i in tokenizer.language_ids.items()}
        return {name: i for i, name in enumerate(SPECIALS)} | languages
    if isinstance(tokenizer, CLIPTokenizer):
        return CLIP_ENDS
    if isinstance(tokenizer, WordPieceTokenizer):
        named = tokenizer.control | {tokenizer.unknown_id}
        return {tokenizer.vocab[i]: i for i in sorted(named) if i < len(tokenizer.vocab)}
    own = getattr(tokenizer, "control_ids", None)
    return dict(own if own is not None else tokenizer.control_names)


def write_tokenizer(checkpoint: Checkpoint, folder: Path) -> bool:
    """Write the tokenizer; return False for one that transformers does not know."""
    tokenizer = checkpoint.required_tokenizer()
    pipeline = tokenizer.pipeline()
    if pipeline is None:
        return write_pieces(checkpoint, folder)
    names = control_names(tokenizer)
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    strips = {name: dict.fromkeys(flags, True) for name, flags in getattr(tokenizer, "strips", {}).items()}
    mask = {"lstrip": tokenizer.mask_lstrip}
    added = [{"id": i, "content": name} | plain | strips.get(name, {}) | (mask if i == tokenizer.mask_id else {})
             for name, i in names.items()]  # fmt: skip
    added += [token for token in pipeline.get("added_tokens") or [] if not token["special"]]
    added.sort(key=lambda token: token["id"])
    causal = isinstance(checkpoint.model, TextTransformer) and checkpoint.model.config.causal
    translates = isinstance(checkpoint.model, EncoderDecoder) and tokenizer.language_ids
    begin = None if translates else tokenizer.bos_id  # its texts begin with their language
    ends = begin, None if causal and not tokenizer.puts_end else tokenizer.eos_id
    pipeline["model"] = with_control(pipeline["model"], names)
    pipeline |= {"added_tokens": added, "post_processor": _around(names, tokenizer, *ends)}
    write_json(folder / "tokenizer.json", pipeline)
    kind = next((name for own, name in CLASSES.items() if isinstance(tokenizer, own)), "PreTrainedTokenizerFast")
    spelled = {i: name for name, i in names.items()}
    ids = {role: getattr(tokenizer, own) for role, own in ROLES.items()} | {"bos_token": begin_id(checkpoint)}
    if not causal and None not in ends:  # an encoder's, which prompts and classes of transformers read
        ids |= {"cls_token": ends[0], "sep_token": ends[1]}
    roles = {role: spelled[i] for role, i in ids.items() if i in spelled}
    if isinstance(tokenizer, CLIPTokenizer):
        roles |= {"pad_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    if "eos_token" in roles:  # bytes spell all texts, but CTranslate2 needs a name
        roles = {"unk_token": next((name for name in UNKNOWN if name in names), roles["eos_token"])} | roles
    roles = _template_roles(checkpoint, spelled) | roles
    record = {"tokenizer_class": kind, "model_max_length": longest_text(checkpoint), **roles}
    record |= {"padding_side": "left"} if causal else {}  # of the prompts of a batch
    if kind == "PreTrainedTokenizerFast":  # a model without segments refuses them
        segments = ["token_type_ids"] if getattr(checkpoint.model.config, "segments", 0) > 1 else []
        record["model_input_names"] = ["input_ids", *segments, "attention_mask"]
    if isinstance(tokenizer, WordPieceTokenizer):  # they override tokenizer.json
        record |= {"do_lower_case": tokenizer.lowercase, "strip_accents": tokenizer.strip_accents,
                   "tokenize_chinese_chars": tokenizer.split_chinese}  # fmt: skip
    write_json(folder / RECORD, record | {"clean_up_tokenization_spaces": False} | _flags(tokenizer))
    _write_template(checkpoint, folder)
    return True


def _flags(tokenizer: Tokenizer) -> dict[str, Any]:
    """Settings of cleaned and of cut texts, where they are unusual."""
    made: dict[str, Any] = {"clean_up_tokenization_spaces": True} if tokenizer.cleans else {}
    return made | ({"truncation_side": "left"} if tokenizer.cuts_left else {})


def begin_id(checkpoint: Checkpoint) -> int | None:
    """Id that texts begin with, or else the one that a chat template writes, or that the vocabulary names."""
    tokenizer, chat = checkpoint.required_tokenizer(), checkpoint.chat
    told = "" if chat is None else chat.tokens.get("bos_token", "")
    ids = tokenizer.bos_id, tokenizer.control_names.get(told), tokenizer.named_bos_id
    return next((i for i in ids if i is not None), None)


def _template_roles(checkpoint: Checkpoint, names: Mapping[int, str]) -> dict[str, str]:
    """Tokens that the chat template may read."""
    told = checkpoint.chat.tokens if checkpoint.chat is not None else {}
    return {role: name for role, name in told.items() if role in ROLES and name in names.values()}


def longest_text(checkpoint: Checkpoint) -> int:
    """Number of tokens."""
    return checkpoint.required_tokenizer().context or _context(checkpoint)


def _write_template(checkpoint: Checkpoint, folder: Path) -> None:
    if checkpoint.chat is not None:
        (folder / "chat_template.jinja").write_text(checkpoint.chat.template, encoding="utf-8")


def write_generation(checkpoint: Checkpoint, config: dict[str, Any], folder: Path) -> None:
    """Ids that `generate` needs, which config.json has, with all that end a text, and the search of the card, as far
    as `generate` has it without sampling and without code from the hub."""
    names = ("bos_token_id", "pad_token_id", "decoder_start_token_id")
    made = {name: config[name] for name in names if config.get(name) is not None}
    if isinstance(checkpoint.model, EncoderDecoder):  # or else it ends after 20 tokens
        made["max_length"] = _context(checkpoint)
    made = _searching(made, checkpoint) | {"eos_token_id": end_ids(checkpoint)}
    write_json(folder / "generation_config.json", made)


def _searching(made: dict[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """The record of a generation_config.json with the search that the card asks for."""
    asked = checkpoint.card.get("generation") or {}
    own = {name: value for name, value in asked.items() if name in SEARCH and name != "num_beam_groups"}
    beams, texts = own.get("num_beams", 1), own.get("num_return_sequences", 1)
    if not type(beams) is type(texts) is int or texts > beams:  # which `generate` refuses
        own.pop("num_return_sequences", None)
    return {name: value for name, value in made.items() if name != "max_length" or "max_new_tokens" not in own} | own


def _context(checkpoint: Checkpoint) -> int:
    config = checkpoint.model.config
    return getattr(config, "context", None) or config.decoder.context


def _around(names: dict[str, int], tokenizer: Tokenizer, bos: int | None, eos: int | None) -> dict[str, Any] | None:
    """The pipeline's step that puts tokens around a text, and around the two of a pair."""
    spelled = {i: name for name, i in names.items()}
    ends = [spelled.get(i) for i in (bos, eos)]
    if not any(ends):
        return None
    tokens = {name: {"id": name, "ids": [names[name]], "tokens": [name]} for name in ends if name}

    def part(name: str | None, kind: int) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": name, "type_id": kind}}] if name else []

    own = tokenizer.pair_segment
    first, second = ({"Sequence": {"id": letter, "type_id": kind}} for letter, kind in (("A", 0), ("B", own)))
    single = [*part(ends[0], 0), first, *part(ends[1], 0)]
    pair = [*single, *part(ends[1], 0) * (tokenizer.pair_ends - 1), second, *part(ends[1], own)]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}


def write_pieces(checkpoint: Checkpoint, folder: Path) -> bool:
    """Write SentencePiece models under transformers' names; return False for another tokenizer."""
    tokenizer = checkpoint.required_tokenizer()
    if isinstance(tokenizer, T5Text):
        record = {"tokenizer_class": "T5Tokenizer", "extra_ids": len(tokenizer.sentinel_ids)}
    elif isinstance(tokenizer, SigLIPText):
        record = {"tokenizer_class": "SiglipTokenizer", "model_max_length": tokenizer.context}
    elif isinstance(tokenizer, PiecesTokenizer):
        kind = "MarianTokenizer" if tokenizer.language_in_source else "M2M100Tokenizer"
        record = {"tokenizer_class": kind, "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
        record |= {"separate_vocabs": True} if tokenizer.target_vocab is not None else {}
        if not tokenizer.language_in_source:  # or else transformers 5 decodes them as text
            record["additional_special_tokens"] = [*tokenizer.languages]
    elif isinstance(tokenizer, SentencePieceTokenizer) and tokenizer.bos_id is not None and not tokenizer.canonical:
        _write_llama(checkpoint, tokenizer, folder)
        _write_template(checkpoint, folder)
        return True
    else:
        return False
    tokenizer.save(folder)
    if isinstance(tokenizer, PiecesTokenizer) and tokenizer.added:
        write_json(folder / ADDED, tokenizer.added)
    if isinstance(tokenizer, PiecesTokenizer) and not tokenizer.language_in_source:
        (folder / "source.spm").rename(folder / "sentencepiece.bpe.model")
    elif isinstance(tokenizer, PiecesTokenizer) and not (folder / "target.spm").exists():
        (folder / "target.spm").write_bytes((folder / "source.spm").read_bytes())
    if isinstance(tokenizer, SigLIPText):
        (folder / tokenizer.path.with_suffix(".model").name).rename(folder / "spiece.model")
    write_json(folder / RECORD, record | _flags(tokenizer))
    return True


def _write_llama(checkpoint: Checkpoint, tokenizer: SentencePieceTokenizer, folder: Path) -> None:
    """A model as Llama's, with the names of its tokens, since fine-tunes add some and end texts with one."""
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    names = tokenizer.special_names()
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    added = {i: flags | {"content": name, "special": name not in tokenizer.added} for i, name in names.items()}
    roles = {role: names[i] for role, own in ROLES.items() if (i := getattr(tokenizer, own)) in names}
    if tokenizer.pad_id == tokenizer.unknown_id:  # ours for a folder without a pad
        del roles["pad_token"]
    roles = _template_roles(checkpoint, names) | roles
    (folder / "tokenizer.model").write_bytes(proto := tokenizer.proto())
    space = ModelProto.FromString(proto).normalizer_spec.add_dummy_prefix
    write_json(folder / RECORD, {
        "tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": tokenizer.puts_end,
        "legacy": tokenizer.prepend_scheme == "always", "add_prefix_space": space, **roles,
        "added_tokens_decoder": added})  # fmt: skip


def image_processor(record: Preprocessing, kind: str) -> dict[str, Any] | None:
    """`preprocessor_config.json`; None for steps that transformers lacks. Its crop may lie half a pixel off ours."""
    if record.tiling is not None or record.resize not in ("shortest", "squash"):
        return None
    names = {"clip": "CLIP", "siglip": "Siglip", "vit": "ViT", "deit": "DeiT", "beit": "Beit"}
    (height, width), edges = record.size, [int(edge / record.crop) for edge in record.size]
    crops = record.resize == "shortest" or record.crop != 1
    if record.resize == "shortest" and height != width:
        return None
    size = {"shortest_edge": edges[0]} if record.resize == "shortest" else {"height": edges[0], "width": edges[1]}
    made = {"do_resize": True, "size": size, "resample": RESAMPLE[record.interpolation], "do_rescale": True,
            "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": list(record.mean),
            "image_std": list(record.std), "do_center_crop": crops,
            "image_processor_type": f"{names.get(kind, 'Bit' if crops else 'ViT')}ImageProcessor"}  # fmt: skip
    return made | ({"crop_size": {"height": height, "width": width}} if crops else {})


def write_whisper(checkpoint: Checkpoint, folder: Path) -> None:
    """Features of the sound, and what `generate` needs of the vocabulary and the card's options."""
    model: Whisper = checkpoint.model
    frames = 2 * model.config.encoder.context
    write_json(folder / "preprocessor_config.json", {
        "feature_extractor_type": "WhisperFeatureExtractor", "processor_class": "WhisperProcessor",
        "feature_size": model.config.encoder.bands, "sampling_rate": RATE, "hop_length": HOP, "n_fft": WINDOW,
        "chunk_length": frames * HOP // RATE, "nb_max_frames": frames, "n_samples": frames * HOP,
        "padding_side": "right", "padding_value": 0.0, "return_attention_mask": False,
    })  # fmt: skip
    t = checkpoint.tokenizer
    if not isinstance(t, WhisperTokenizer):
        return
    own = options_for(checkpoint, {})
    latest = own.max_initial_timestamp
    record = {
        "bos_token_id": t.eot, "eos_token_id": t.eot, "pad_token_id": t.eot, "decoder_start_token_id": t.sot,
        "no_timestamps_token_id": t.no_timestamps, "is_multilingual": t.multilingual,
        "suppress_tokens": t.suppressed_tokens(own.suppress_tokens),
        "begin_suppress_tokens": [*t.encode(" "), t.eot] if own.suppress_blank else [],
        "max_length": model.config.decoder.context,
        "prev_sot_token_id": t.sot_prev, "return_timestamps": False,
        "max_initial_timestamp_index": round(latest / t.SECONDS_PER_TIMESTAMP) if latest else None,
    }  # fmt: skip
    asked = checkpoint.card.get("transcribe") or {}
    record |= {name: asked[own] for name, own in TRANSCRIBE_OPTIONS.items() if own in asked}
    if t.multilingual:
        languages = zip(t.languages, t.language_tokens, strict=True)
        record |= {
            "lang_to_id": {f"<|{code}|>": i for code, i in languages},
            "task_to_id": {"transcribe": t.transcribe, "translate": t.translate},
            "task": own.task,
        }  # or else no task follows a language that was detected
        record |= {"language": own.language} if own.language else {}
    if heads := checkpoint.card.get("alignment_heads"):
        record["alignment_heads"] = [list(pair) for pair in heads]
    write_json(folder / "generation_config.json", _searching(record, checkpoint))
