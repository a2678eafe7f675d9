"""The dense decoder family: one module for all architectures of `models.registry`; their differences are fields of ModelConfig.

A layer is h + post_norm(attention(pre_norm(h))), then the same with the MLP; an architecture has one or both of the norms.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.kernels.attention import AttentionMetadata
from headrace.models.layers import MLP, Attention, Linear, RMSNorm
from headrace.models.model_config import ModelConfig
from headrace.models.rope import RopeConfig, RotaryEmbedding, rotary_embeddings


class Embedding(nn.Module):
    """Rows of a weight [V, E] by token id."""

    def __init__(self, num_embeddings: int, size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_embeddings, size, dtype=dtype, device=device), requires_grad=False)

    def forward(self, ids_T: Tensor) -> Tensor:
        return F.embedding(ids_T, self.weight)

    def linear(self, x: Tensor) -> Tensor:
        """x @ weight.T: the output of a model that ties both."""
        return F.linear(x, self.weight)


class DecoderLayer(nn.Module):
    attention_class: type[Attention] = Attention
    mlp_class: type[MLP] = MLP

    def __init__(self, config: ModelConfig, layer: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()

        def norm(present: bool) -> nn.Module:
            return RMSNorm(config.hidden_size, eps=config.rms_norm_eps, device=device) if present else nn.Identity()

        self.attention_pre_norm = norm(config.pre_norm)
        self.attention = self.attention_class(config, layer, dtype=dtype, device=device)
        self.attention_post_norm = norm(config.post_norm)
        self.mlp_pre_norm = norm(config.pre_norm)
        self.mlp = self.mlp_class(config, dtype=dtype, device=device)
        self.mlp_post_norm = norm(config.post_norm)

    def forward(self, h_TE: Tensor, cos_sin: tuple[Tensor, Tensor] | None, kv_cache: tuple[Tensor, Tensor], meta: AttentionMetadata) -> Tensor:
        h_TE = h_TE + self.attention_post_norm(self.attention(self.attention_pre_norm(h_TE), cos_sin, kv_cache, meta))
        return h_TE + self.mlp_post_norm(self.mlp(self.mlp_pre_norm(h_TE)))


class Decoder(nn.Module):
    """A causal language model over a paged KV cache. Weights are empty until `models.loader.load_model` fills them."""

    layer_class: type[DecoderLayer] = DecoderLayer

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.dtype, self.device = dtype, device
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = nn.ModuleList(self.layer_class(config, i, dtype=dtype, device=device) for i in range(config.num_layers))
        self.final_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, device=device)
        self.lm_head = None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype, device=device)
        # rounded to the model's dtype, as the models were trained
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        # Rotations are no weights: a model without memory has them too. To compute on the meta device would load sympy and torch's compiler
        # (1.5 s, 70 MiB).
        self._ropes = rotary_embeddings(config.ropes, torch.device("cpu") if device.type == "meta" else device)

    @property
    def ropes(self) -> dict[RopeConfig, RotaryEmbedding]:
        """One for each kind of rotation that the layers have."""
        return self._ropes

    def forward(
        self,
        input_ids_T: Tensor,
        positions_T: Tensor,
        kv_caches: list[tuple[Tensor, Tensor]],
        meta: AttentionMetadata,
        cos_sin: dict[RopeConfig, tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, [T, E], of a step's tokens.

        input_ids and positions: int64 [T]. kv_caches: (keys, values) of each layer, [num_blocks, block_size, K, D]; the
        step's own are written here. cos_sin: what the rotations of `ropes` give for the positions, where the caller has it already.
        The caller holds `torch.inference_mode()`.
        """
        if cos_sin is None:
            cos_sin = self._cos_sin(positions_T, meta)
        h_TE = self.embed_tokens(input_ids_T)
        if self._embedding_scale != 1.0:
            h_TE = h_TE * self._embedding_scale
        return self.final_norm(self._run_layers(h_TE, cos_sin, kv_caches, meta))

    def _run_layers(
        self, h_TE: Tensor, cos_sin: dict[RopeConfig, tuple[Tensor, Tensor]], kv_caches: list[tuple[Tensor, Tensor]], meta: AttentionMetadata
    ) -> Tensor:
        for layer, rope, kv_cache in zip(self.layers, self.config.ropes, kv_caches, strict=True):
            h_TE = layer(h_TE, None if rope is None else cos_sin[rope], kv_cache, meta)
        return h_TE

    def compute_logits(self, hidden_RE: Tensor) -> Tensor:
        """float32 [R, V] for the hidden states of the positions to sample at."""
        head = self.embed_tokens.linear if self.lm_head is None else self.lm_head
        logits_RV = head(hidden_RE).float()
        softcap = self.config.logit_softcap
        return logits_RV if softcap is None else torch.tanh(logits_RV / softcap) * softcap

    def _cos_sin(self, positions_T: Tensor, meta: AttentionMetadata) -> dict[RopeConfig, tuple[Tensor, Tensor]]:
        length_T = None
        if any(rope.length_dependent for rope in self._ropes):
            lengths = meta.context_lens if meta.prompt_lens is None else meta.prompt_lens
            per_token = itertools.chain.from_iterable(itertools.repeat(n, count) for n, count in zip(lengths, meta.query_lens, strict=True))
            prompt_T = torch.tensor(list(per_token), dtype=torch.int64, device=positions_T.device)
            length_T = torch.maximum(prompt_T, positions_T + 1)
        return {rope: embedding.cos_sin(positions_T, length_T, self.dtype) for rope, embedding in self._ropes.items()}
