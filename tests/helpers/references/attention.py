"""PyTorch references of attention."""

import torch
from torch import nn

from multimodal.blocks.attention import Attention

B, T, S, D, H = 3, 6, 5, 16, 4


def torch_attention(module: Attention) -> nn.MultiheadAttention:
    other = nn.MultiheadAttention(D, H, batch_first=True).eval()
    other.in_proj_weight.data = torch.cat([p.weight.data for p in (module.query, module.key, module.value)])
    other.in_proj_bias.data = torch.cat([p.bias.data for p in (module.query, module.key, module.value)])
    other.out_proj.load_state_dict(module.out.state_dict())
    return other
