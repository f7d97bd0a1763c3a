"""Blocks: tokens to tokens. Attention, masks, positions, layers, convolutions and the stack."""
