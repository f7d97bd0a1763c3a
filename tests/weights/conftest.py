"""Checkpoints in foreign layouts."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory) -> Path:
    """A tiny Whisper as transformers saves it."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = dict(  # noqa: C408
        d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=51864, max_source_positions=20, max_target_positions=12,
        pad_token_id=50256, bos_token_id=50256, eos_token_id=50256, decoder_start_token_id=50257,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("hf") / "model"
    WhisperForConditionalGeneration(WhisperConfig(**sizes)).save_pretrained(folder)
    return folder
