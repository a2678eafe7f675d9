"""A model that the CPU kernels compute: its matrices are packed, in the blocks of a GGUF file as they are or in a floating point dtype.

A Decoder is made without memory (on the meta device), then every part of it that holds weights gives way to a packed one. So loading
takes the packed size and a copy or two of one matrix; norms and biases are float32, and so is all that is computed.
"""

from __future__ import annotations

import logging
from functools import partial
from itertools import groupby

import torch
from torch import Tensor, nn

from headrace.kernels import cpu
from headrace.kernels.attention import AttentionMetadata, paged_attention
from headrace.models.decoder import Decoder, DecoderLayer, Embedding
from headrace.models.gguf import GGUFFile
from headrace.models.gguf_config import gguf_model_config
from headrace.models.layer_runs import LayerConstants, LayerRun, find_runs
from headrace.models.layers import MLP, Attention, Linear, RMSNorm
from headrace.models.model_config import ModelConfig
from headrace.models.packed_sources import BlockSource, PackedSource
from headrace.models.rope import RopeConfig
from headrace.models.weights import GGUFSource, match_names, wrong_shape

logger = logging.getLogger("headrace.models")


def load_packed(file: GGUFFile) -> Decoder:
    """In the file's blocks. The kernels must be loaded (`kernels.cpu.load`). Raises ModelLoadError as `loader.load_model` does."""
    arch, config = gguf_model_config(file)
    model = PackedDecoder(config, torch.float32)
    source = GGUFSource(file, arch, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads)
    names = match_names(model, source, table=arch.gguf_names)
    matrices = [name for parameter, tensors in names.items() if model.get_parameter(parameter).dim() == 2 for name in tensors]
    others = sorted({file.tensors[name].type_name for name in matrices if file.tensors[name].type_number not in cpu.FORMATS})
    fill_packed(model, BlockSource(source), names)
    if others:
        logger.warning("there is no kernel for %s: these weights of %s are kept as float16", ", ".join(others), source.where)
    return model


def fill_packed(model: PackedDecoder, source: PackedSource, names: dict[str, list[str]], *, norm_offset: float = 0.0) -> None:
    """Replaces the parts of an empty model by packed ones. `names`: parameter -> the source's tensors that are stacked into it (`match_names`)."""
    loader = _Loader(source, dict(model.named_parameters()), names, norm_offset)
    for path, module in list(model.named_modules()):
        packed = loader.packed(path, module)
        if packed is not None:
            model.set_submodule(path, packed)
    model.choose_calls()


class PackedNorm(nn.Module):
    """`layers.RMSNorm` by our kernel."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return cpu.rms_norm(x, self.weight, self.eps)


class PackedStack(nn.Module):
    """One product of parts in different formats, as where a file holds v in more bits than q and k."""

    def __init__(self, parts: list[cpu.PackedLinear]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor, meta: AttentionMetadata | None = None) -> Tensor:
        return torch.cat([part(x, meta) for part in self.parts], dim=-1)


class PackedAttention(Attention):
    """The same in three kernels: rotation and write to the cache, attention, and the products around them."""

    def forward(self, x_TE: Tensor, cos_sin: tuple[Tensor, Tensor], kv_cache: tuple[Tensor, Tensor], meta: AttentionMetadata) -> Tensor:
        qkv = self.qkv(x_TE, meta)
        if self.qk_norm is not None:
            qk, v = qkv.split((self.q_size + self.kv_size, self.kv_size), dim=-1)
            qkv = torch.cat((self.norm_qk(qk), v), dim=-1)
        q_THD = cpu.rope_write_kv(qkv, cos_sin, *kv_cache, meta.slot_mapping_T)
        attend = paged_attention
        if self.head_dim % cpu.HEAD_STEP == 0:
            attend = partial(cpu.paged_attention, prompts_in_bfloat16=self.output.in_bfloat16)
        out_THD = attend(q_THD, *kv_cache, meta, scale=self.scale, sliding_window=self.sliding_window, logit_softcap=self.logit_softcap)
        return self.output(out_THD.flatten(1), meta)


class PackedMLP(MLP):
    """The same with products that know what kind of token each is."""

    def forward(self, x_TE: Tensor, meta: AttentionMetadata | None = None) -> Tensor:
        gate, up = self.gate_up(x_TE, meta).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up, meta)  # the activation is torch's: see runner.deterministic


class PackedLayer(DecoderLayer):
    """Each half is one call where the layer has nothing but what that call knows, else step by step."""

    attention_class = PackedAttention
    mlp_class = PackedMLP

    def choose_calls(self) -> None:
        """Once the weights are there."""
        attention, mlp = self.attention, self.mlp
        self._attention_in_one = (
            _plain(attention.qkv, attention.output)
            and _only_before(self.attention_pre_norm, self.attention_post_norm)
            and attention.qk_norm is None
            and attention.head_dim % cpu.HEAD_STEP == 0
        )
        self._mlp_in_one = (
            _plain(mlp.gate_up, mlp.down) and _only_before(self.mlp_pre_norm, self.mlp_post_norm) and mlp.activation is torch.nn.functional.silu
        )

    @property
    def constants(self) -> LayerConstants | None:
        """None where the layer needs more than one call for each half, or its norms differ in eps."""
        attention, eps = self.attention, self.attention_pre_norm.eps if self._attention_in_one and self._mlp_in_one else None
        if eps is None or eps != self.mlp_pre_norm.eps:
            return None
        return LayerConstants(
            eps=eps, num_heads=attention.num_heads, inner=self.mlp.down.columns, scale=attention.scale, logit_softcap=attention.logit_softcap
        )

    def tensors(self) -> tuple[Tensor, ...]:
        attention, mlp = self.attention, self.mlp
        return (
            self.attention_pre_norm.weight,
            attention.qkv.data,
            attention.output.data,
            self.mlp_pre_norm.weight,
            mlp.gate_up.data,
            mlp.down.data,
        )

    @property
    def formats(self) -> tuple[int, ...]:
        attention, mlp = self.attention, self.mlp
        return tuple(linear.format for linear in (attention.qkv, attention.output, mlp.gate_up, mlp.down))

    @property
    def window(self) -> int:
        return self.attention.sliding_window or 0

    def forward(self, h_TE: Tensor, cos_sin: tuple[Tensor, Tensor], kv_cache: tuple[Tensor, Tensor], meta: AttentionMetadata) -> Tensor:
        """Changes h."""
        attention, mlp = self.attention, self.mlp
        if self._attention_in_one:
            norm = self.attention_pre_norm
            cpu.attention_add_(
                h_TE,
                norm.weight,
                norm.eps,
                attention.qkv,
                attention.output,
                attention.num_heads,
                cos_sin,
                kv_cache,
                meta,
                scale=attention.scale,
                sliding_window=attention.sliding_window,
                logit_softcap=attention.logit_softcap,
            )
        else:
            h_TE += self.attention_post_norm(attention(self.attention_pre_norm(h_TE), cos_sin, kv_cache, meta))
        if self._mlp_in_one:
            cpu.mlp_add_(h_TE, self.mlp_pre_norm.weight, self.mlp_pre_norm.eps, mlp.gate_up, mlp.down, meta)
        else:
            h_TE += self.mlp_post_norm(mlp(self.mlp_pre_norm(h_TE), meta))
        return h_TE


class PackedDecoder(Decoder):
    layer_class = PackedLayer

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        """`dtype`: of the model's parameters, where they are floats; computed is in float32."""
        super().__init__(config, dtype=dtype, device=torch.device("meta"))
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self._parts: list[LayerRun | int] = list(range(config.num_layers))  # in order; a number is a layer by itself

    def choose_calls(self) -> None:
        """Once the weights are there."""
        for layer in self.layers:
            layer.choose_calls()
        self._parts = find_runs(list(self.layers), [layer.constants for layer in self.layers], self.config.ropes)

    def use_16_bit_activations(self) -> None:
        """From now on, in all products with weights in blocks."""
        cpu.activations_of_16_bits(self)
        self.choose_calls()

    def _run_layers(
        self, h_TE: Tensor, cos_sin: dict[RopeConfig, tuple[Tensor, Tensor]], kv_caches: list[tuple[Tensor, Tensor]], meta: AttentionMetadata
    ) -> Tensor:
        """Changes h."""
        for part in self._parts:
            rope = self.config.ropes[part if isinstance(part, int) else part.first]
            turn = _no_rotation(h_TE) if rope is None else cos_sin[rope]
            if isinstance(part, int):
                h_TE = self.layers[part](h_TE, turn, kv_caches[part], meta)
            else:
                part.add(h_TE, turn, kv_caches, meta)
        return h_TE


def _no_rotation(h_TE: Tensor) -> tuple[Tensor, Tensor]:
    nothing = h_TE.new_empty(h_TE.shape[0], 1, 0)
    return nothing, nothing


def _plain(*linears: nn.Module) -> bool:
    return all(isinstance(linear, cpu.PackedLinear) and linear.bias is None for linear in linears)


def _only_before(pre_norm: nn.Module, post_norm: nn.Module) -> bool:
    return isinstance(pre_norm, PackedNorm) and isinstance(post_norm, nn.Identity)


class _Loader:
    """Makes the packed form of each module."""

    def __init__(self, source: PackedSource, parameters: dict[str, nn.Parameter], names: dict[str, list[str]], norm_offset: float) -> None:
        self._source, self._parameters, self._names, self._norm_offset = source, parameters, names, norm_offset
        matrices = [name for name in names if parameters[name].dim() == 2]
        for name in matrices:
            self._check_shapes(name)
        self._arena = cpu.Arena(sum(self._room(group) for name in matrices for group in self._groups(name)))

    def packed(self, path: str, module: nn.Module) -> nn.Module | None:
        """None for a module that holds no weights itself."""
        match module:
            case Linear():
                parts = self._matrix(f"{path}.weight")
                biases = [None] * len(parts) if module.bias is None else self._vector(f"{path}.bias").split([part.rows for part in parts])
                linears = [cpu.PackedLinear(part, bias) for part, bias in zip(parts, biases, strict=True)]
                return linears[0] if len(linears) == 1 else PackedStack(linears)
            case Embedding():
                return cpu.PackedEmbedding(*self._matrix(f"{path}.weight"))
            case RMSNorm():
                return PackedNorm(self._vector(f"{path}.weight") + self._norm_offset, module.eps)
        return None

    def _vector(self, parameter_name: str) -> Tensor:
        parameter, names = self._parameters[parameter_name], self._names[parameter_name]
        vector = torch.cat([self._source.vector(name).flatten() for name in names])
        if vector.shape != parameter.shape:
            raise wrong_shape(self._source.where, " + ".join(names), vector.shape, parameter)
        return vector

    def _matrix(self, parameter_name: str) -> list[cpu.PackedWeight]:
        return [self._pack(group) for group in self._groups(parameter_name)]

    def _check_shapes(self, parameter_name: str) -> None:
        parameter, names = self._parameters[parameter_name], self._names[parameter_name]
        for name in names:
            shape = self._source.shape(name)
            if len(shape) != 2 or shape[1] != parameter.shape[1]:
                raise wrong_shape(self._source.where, name, shape, parameter)
        rows = sum(self._source.shape(name)[0] for name in names)
        if rows != parameter.shape[0]:
            raise wrong_shape(self._source.where, " + ".join(names), (rows, parameter.shape[1]), parameter)

    def _groups(self, parameter_name: str) -> list[list[str]]:
        """Neighbours of one format, which make one weight."""
        return [list(group) for _, group in groupby(self._names[parameter_name], self._source.type_number)]

    def _room(self, group: list[str]) -> int:
        return cpu.packed_bytes(self._source.type_number(group[0]), *self._size(group)) + cpu.Arena.ALIGNMENT

    def _size(self, group: list[str]) -> tuple[int, int]:
        return sum(self._source.shape(name)[0] for name in group), self._source.shape(group[0])[1]

    def _pack(self, group: list[str]) -> cpu.PackedWeight:
        rows, columns = self._size(group)
        raw = self._source.rows(group[0]) if len(group) == 1 else torch.cat([self._source.rows(name) for name in group])
        return cpu.pack(self._source.type_number(group[0]), raw.flatten(), rows, columns, arena=self._arena)
