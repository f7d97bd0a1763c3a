"""A small tokenizer of Gemma's kind, as SigLIP 2 has it."""

import json
from pathlib import Path

SPECIALS = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]


def gemma_tokenizer(folder: Path):
    """A tokenizer as `google/siglip2-…` has it (transformers' convert_siglip_to_hf.py), on a small vocabulary."""
    from tokenizers import Tokenizer, models, normalizers, trainers
    from transformers import Siglip2Tokenizer

    learner = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    learner.normalizer = normalizers.Replace(" ", "▁")
    specials = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))]
    texts = ["a photo of a dog .", "two cats on the mat", "zwei hunde am strand", "cats and dogs"] * 9
    learner.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=400, special_tokens=specials, show_progress=False)
    )
    model = json.loads(learner.to_str())["model"]
    made = Siglip2Tokenizer(
        model["vocab"], [tuple(pair) for pair in model["merges"]], add_eos_token=True, add_bos_token=False,
        padding_side="right",
    )  # fmt: skip
    made.save_pretrained(folder)
    return made
