"""Folders whose one vocabulary file is a SentencePiece model in another order of ids: fairseq's (XLM-R, CamemBERT,
mBART-50), Pegasus' and ALBERT's."""

from pathlib import Path
from typing import Any, NamedTuple

from multimodal.system.files import optional_json
from multimodal.tokens.text.hub.added import class_name
from multimodal.tokens.text.hub.build import BERT_NAMES, SPLIT, unigram_tokenizer
from multimodal.tokens.text.hub.pipeline import FILE as PIPELINE
from multimodal.tokens.text.hub.pipeline import HubTokenizer
from multimodal.tokens.text.tokenizer import RECORD

# in the order of their ids (fairseq, examples/multilingual)
_MBART50 = """
    ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM ne_NP nl_XX
    ro_RO ru_RU si_LK tr_TR vi_VN zh_CN af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN
    pl_PL ps_AF pt_XX sv_SE sw_KE ta_IN te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI
"""


class IdOrder(NamedTuple):
    """`first`: special tokens in place of the model's first `skipped` pieces; `last`: those after its pieces."""

    file: str
    first: tuple[str, ...] = ()
    skipped: int = 0
    last: tuple[str, ...] = ()


FAIRSEQ, PIECES = ("<s>", "<pad>", "</s>", "<unk>"), "sentencepiece.bpe.model"
UNUSED = ("<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED")
SPANS = ("<pad>", "</s>", "<mask_1>", "<mask_2>", *(f"<unk_{i}>" for i in range(2, 103)))
ORDERS = {  # by transformers' class
    "XLMRobertaTokenizer": IdOrder(PIECES, FAIRSEQ, 3, ("<mask>",)),
    "CamembertTokenizer": IdOrder(PIECES, UNUSED, 1, ("<mask>",)),
    "MBart50Tokenizer": IdOrder(PIECES, FAIRSEQ, 3, (*_MBART50.split(), "<mask>")),
    "PegasusTokenizer": IdOrder("spiece.model", SPANS, 2),
    "AlbertTokenizer": IdOrder("spiece.model"),
}
NAMES = {"bos": "<s>", "eos": "</s>", "pad": "<pad>", "unk": "<unk>"}


def pieces_tokenizer(
    folder: Path, config: dict[str, Any], size: int, context: int | None = None, lowercase: bool = False
) -> HubTokenizer | None:
    """From the SentencePiece model of a folder without tokenizer.json; None for other folders. Blanks around a text are
    dropped, as SentencePiece does. The arguments as in `hub_tokenizer`. Raises CheckpointError."""
    record = optional_json(folder / RECORD)
    order = ORDERS.get(kind := class_name(record, config) or "")
    if order is None or (folder / PIPELINE).exists() or not (path := folder / order.file).is_file():
        return None
    albert = kind == "AlbertTokenizer"
    names = BERT_NAMES | {"pad": "<pad>", "unk": "<unk>"} if albert else NAMES
    return unigram_tokenizer(
        path, SPLIT, names, config | {"tokenizer_class": kind}, size, context, first=order.first,
        skipped=order.skipped, more=order.last, before=_albert(record) if albert else (), lowercase=lowercase,
    )  # fmt: skip


def _albert(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Normalizers before the model's own."""
    quotes = [{"type": "Replace", "pattern": {"String": two}, "content": '"'} for two in ("``", "''")]
    accents = [] if record.get("keep_accents", False) else [{"type": "NFKD"}, {"type": "StripAccents"}]
    return [*quotes, *accents, *([{"type": "Lowercase"}] if record.get("do_lower_case", True) else [])]
