"""Random models of released sizes, as transformers' and as our checkpoint; sentences and their lengths."""

import gzip
import random
import re
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from multimodal.weights import bert_hf, gpt2, t5
from multimodal.weights.family import Family
from multimodal.weights.folder import Checkpoint

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "text"
SPREAD = 4.0  # of the blocks' weights: with those of a new model greedy decoding repeats one token


def _made(theirs: nn.Module, family: Family, name: str) -> tuple[nn.Module, Checkpoint]:
    theirs = theirs.eval().requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PyTorch's on `.T` of a vector
        return theirs, family.load(theirs.state_dict(), theirs.config.to_dict(), f"random {name}")


def _spread(theirs: nn.Module, blocks: str) -> nn.Module:
    for name, tensor in theirs.named_parameters():
        if blocks in name and tensor.ndim == 2:
            tensor.data.mul_(SPREAD)
    return theirs


def gpt2_small(**sizes: int) -> tuple[nn.Module, Checkpoint]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    theirs = _spread(GPT2LMHeadModel(GPT2Config(**sizes)), ".h.")
    theirs.generation_config.eos_token_id = None
    return _made(theirs, gpt2.FAMILY, "GPT-2 small")


def bert_base(**sizes: int) -> tuple[nn.Module, Checkpoint]:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    return _made(BertModel(BertConfig(**sizes)), bert_hf.MODEL, "BERT base")


def t5_small(**sizes: int) -> tuple[nn.Module, Checkpoint]:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    theirs = _spread(T5ForConditionalGeneration(T5Config(**{"decoder_start_token_id": 0, **sizes})), "decoder.block.")
    theirs.generation_config.eos_token_id = None
    return _made(theirs, t5.FAMILY, "T5 small")


def generated(theirs: nn.Module, ids: Tensor, count: int) -> list[list[int]]:
    """`count` new tokens of each row by transformers' greedy `generate`, as it comes but for the end, which it has
    none of."""
    found = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return found[:, -count:].tolist()


def sentence_lengths(count: int) -> tuple[list[int], str]:
    """Tokens of sentences, drawn with a seed, and where they are from: words and marks of SST-2's dev sentences and the
    two that BERT puts around them, else numbers of the like."""
    draw, path = random.Random(0), DATA / "sst2" / "dev.tsv.gz"
    if not path.is_file():
        return [max(4, round(draw.gauss(21, 9))) for _ in range(count)], "drawn"
    rows = gzip.decompress(path.read_bytes()).decode().splitlines()
    texts = draw.sample([row.rsplit("\t", 1)[0] for row in rows], count)
    return [2 + len(re.findall(r"\w+|[^\w\s]", text)) for text in texts], "SST-2, words and marks"


def megabyte() -> tuple[str, str]:
    """A million characters of English, and where they are from."""
    path = DATA / "tinyshakespeare" / "input.txt"
    if path.is_file():
        return path.read_text()[:1_000_000], "tinyshakespeare"
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(1, 9))) for _ in range(5000)]
    return " ".join(draw.choices(words, k=200_000))[:1_000_000], "drawn words"


def tokenizers(text: str) -> dict[str, tuple[Callable[[str], list[int]], Callable[[str], list[int]]]]:
    """Ours and the library's of the same vocabulary: GPT-2's own, and two that are learned from the text."""
    import tiktoken
    from tokenizers import ByteLevelBPETokenizer, Tokenizer

    from multimodal.tokens.hub_files import hub_tokenizer
    from multimodal.tokens.tiktokens import GPT2Tokenizer
    from multimodal.tokens.wordpiece import WordPieceTokenizer

    own = GPT2Tokenizer()
    ranks = {bytes(own._encoding.decode_single_token_bytes(i)): i for i in range(own.plain_size)}
    plain = tiktoken.Encoding("plain", pat_str=own._encoding._pat_str, mergeable_ranks=ranks, special_tokens={})
    pieces = WordPieceTokenizer.train(text.splitlines(), 8000)
    with tempfile.TemporaryDirectory() as place:
        learner = ByteLevelBPETokenizer()
        learner.train_from_iterator(text.splitlines(), 8000, special_tokens=["<|endoftext|>"], show_progress=False)
        learner.save(f"{place}/tokenizer.json")
        hub = hub_tokenizer(Path(place), {"vocab_size": learner.get_vocab_size(), "model_type": "gpt2",
                                          "eos_token_id": 0, "bos_token_id": 0})  # fmt: skip
        library = Tokenizer.from_file(f"{place}/tokenizer.json")
    blind = Tokenizer.from_str(pieces._backend.to_str())
    return {
        "GPT-2's vocabulary, beside tiktoken": (own.encode, plain.encode_ordinary),
        "BPE of 8,000, beside tokenizers": (hub.encode, lambda text: library.encode(text).ids),
        "WordPiece of 8,000, beside tokenizers": (
            pieces.encode, lambda text: blind.encode(text, add_special_tokens=False).ids),
    }  # fmt: skip
