"""A decoder as one function of tensors with static shapes: what `torch.compile` can make one graph of, in torch's own operators.

Shape suffixes: B rows, T tokens of a row in this call, E hidden size, V vocabulary. Of the cache: L layers, K key/value heads, S positions, D size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.errors import ConfigError
from headrace.models.decoder import Decoder
from headrace.models.rope import rotate


class PlainDecoder(nn.Module):
    """Every row attends over a cache of `length` positions of its own, of which those up to its position count.

    Raises `ConfigError` for models whose layers need more than that.
    """

    def __init__(self, decoder: Decoder, *, rows: int, length: int) -> None:
        super().__init__()
        config = decoder.config
        if any(config.sliding_windows) or config.attention_softcap is not None or any(rope.length_dependent for rope in decoder.ropes):
            raise ConfigError(
                "bench eager-vs-compiled: sliding windows, capped scores and length-dependent RoPE are not measured; use another model."
            )
        self.decoder = decoder
        self._ropes = list(decoder.ropes)
        for i, embedding in enumerate(decoder.ropes.values()):
            cos, sin = embedding.cos_sin(torch.arange(length, device=decoder.device), None, decoder.dtype)
            self.register_buffer(f"cos_{i}", cos)
            self.register_buffer(f"sin_{i}", sin)
        size = (config.num_layers, 2, rows, config.num_kv_heads, length, config.head_dim)
        self.register_buffer("cache", torch.zeros(size, dtype=decoder.dtype, device=decoder.device))
        self.register_buffer("places", torch.arange(length, device=decoder.device))

    def forward(self, ids_BT: Tensor, positions_T: Tensor) -> Tensor:
        """float32 logits [B, V] of the last token of each row. ids and positions: int64; positions are the same in all rows."""
        decoder, config = self.decoder, self.decoder.config
        rows, tokens = ids_BT.shape
        h_BTE = decoder.embed_tokens(ids_BT) * config.embedding_scale
        seen_TS = self.places <= positions_T[:, None]
        turns = {rope: (getattr(self, f"cos_{i}")[positions_T], getattr(self, f"sin_{i}")[positions_T]) for i, rope in enumerate(self._ropes)}
        for i, (layer, rope) in enumerate(zip(decoder.layers, config.ropes, strict=True)):
            attention = layer.attention
            qk, v = attention.qkv(layer.attention_pre_norm(h_BTE)).split((attention.q_size + attention.kv_size, attention.kv_size), dim=-1)
            heads = attention.num_heads + attention.num_kv_heads
            qk = attention.norm_qk(qk.flatten(0, 1)).view(rows, tokens, heads, attention.head_dim)
            if rope is not None:
                qk = rotate(qk, *turns[rope])
            q, k = qk.transpose(1, 2).split((attention.num_heads, attention.num_kv_heads), dim=1)
            keys, values = self.cache[i, 0], self.cache[i, 1]
            keys.index_copy_(2, positions_T, k)
            values.index_copy_(2, positions_T, v.view(rows, tokens, attention.num_kv_heads, attention.head_dim).transpose(1, 2))
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen_TS, scale=attention.scale, enable_gqa=True)
            h_BTE = h_BTE + layer.attention_post_norm(attention.output(out.transpose(1, 2).flatten(2)))
            h_BTE = h_BTE + layer.mlp_post_norm(layer.mlp(layer.mlp_pre_norm(h_BTE)))
        logits: Tensor = decoder.compute_logits(decoder.final_norm(h_BTE[:, -1]))
        return logits
