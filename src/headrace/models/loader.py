"""From a path to a Decoder with weights: a Hugging Face directory, a GGUF file, or a directory that holds one GGUF file."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch

from headrace.errors import ModelLoadError
from headrace.models.decoder import Decoder
from headrace.models.end_tokens import extra_end_tokens, read_json
from headrace.models.gguf import GGUFFile
from headrace.models.gguf_config import gguf_model_config
from headrace.models.model_config import ModelConfig, model_config
from headrace.models.packed import PackedDecoder, fill_packed, load_packed
from headrace.models.packed_sources import Bits, FloatSource, PackedSource, QuantizedSource
from headrace.models.registry import Architecture, find_architecture
from headrace.models.weights import GGUFSource, SafetensorsSource, WeightSource, load_weights, match_names


def load_model(
    path: str, *, dtype: torch.dtype, device: torch.device, packed: bool = False, kernels: bool = False, bits: Bits | None = None
) -> Decoder:
    """A model with its weights in `dtype` (norms stay float32) on `device`, ready for inference.

    `packed`: the matrices stay in the blocks of a GGUF file, for the CPU kernels, which must be loaded; float32 and CPU only.
    `kernels`: the matrices are in `dtype`, packed for the CPU kernels, which compute in float32 and must be loaded; CPU only.
    `bits`: with `kernels`, the matrices are rounded to blocks of so many bits while they are loaded.
    Raises ModelLoadError, which names the file, tensor or field at fault.
    """
    gguf = find_gguf(Path(path))
    if packed:
        if gguf is None:
            raise ModelLoadError(f"{path}: only the weights of a GGUF file can stay in their blocks, and this is a Hugging Face directory.")
        assert (dtype, device.type) == (torch.float32, "cpu")
        return load_packed(GGUFFile(gguf))
    if gguf is not None:
        return _load_gguf(gguf, dtype=dtype, device=device, kernels=kernels, bits=bits)
    return _load_directory(Path(path), dtype=dtype, device=device, kernels=kernels, bits=bits)


def load_config(path: str) -> ModelConfig:
    """Only what the model is; reads no weights. Raises ModelLoadError."""
    gguf = find_gguf(Path(path))
    if gguf is not None:
        return gguf_model_config(GGUFFile(gguf))[1]
    return _directory_config(Path(path))[1]


def weight_bytes(model: Decoder) -> int:
    """Bytes that the model's weights take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in itertools.chain(model.parameters(), model.buffers()))


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that a path stands for; None for a Hugging Face directory. Raises ModelLoadError where it is neither."""
    if path.is_file():
        if path.suffix in (".bin", ".pt", ".pth"):
            raise ModelLoadError(f"{path}: pickled weights can run code and are never opened; use a safetensors directory or a GGUF file.")
        return path
    if not path.is_dir():
        raise ModelLoadError(f"{path}: there is no such model file or directory.")
    if (path / "config.json").is_file():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        raise ModelLoadError(f"{path}: holds {len(files)} GGUF files; name one of them: {', '.join(file.name for file in files)}.")
    raise ModelLoadError(f"{path}: has neither a config.json nor a GGUF file.")


def _load_gguf(path: Path, *, dtype: torch.dtype, device: torch.device, kernels: bool, bits: Bits | None) -> Decoder:
    file = GGUFFile(path)
    arch, config = gguf_model_config(file)
    source = GGUFSource(file, arch, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads)
    if kernels:
        packed = PackedDecoder(config, dtype)
        names = match_names(packed, source, table=arch.gguf_names)
        fill_packed(packed, _packed_source(source, dtype, bits, names), names)
        return packed
    model = Decoder(config, dtype=dtype, device=device)
    load_weights(model, source, table=arch.gguf_names)
    return model


def _packed_source(source: WeightSource, dtype: torch.dtype, bits: Bits | None, names: dict[str, list[str]]) -> PackedSource:
    if bits is None:
        return FloatSource(source, dtype)
    eights = [name for parameter in ("embed_tokens.weight", "lm_head.weight") for name in names.get(parameter, ())]
    return QuantizedSource(source, bits, eights)


def _directory_config(directory: Path) -> tuple[Architecture, ModelConfig]:
    where = str(directory / "config.json")
    fields = read_json(directory / "config.json")
    class_names = fields.get("architectures") or []
    if not isinstance(class_names, list) or not all(isinstance(name, str) for name in class_names):
        raise ModelLoadError(f"{where}: field 'architectures' must be a list of names, not {class_names!r}.")
    arch = find_architecture(class_names=class_names, model_type=fields.get("model_type"), where=where)
    return arch, model_config(arch, _text_fields(fields, where), eos_token_ids=extra_end_tokens(directory), where=where)


def _text_fields(fields: dict[str, Any], where: str) -> dict[str, Any]:
    """The fields of the language model: those of `text_config` where a model of several modes nests them, over the outer ones."""
    nested = fields.get("text_config")
    if nested is None:
        return fields
    if not isinstance(nested, dict):
        raise ModelLoadError(f"{where}: field 'text_config' must be an object, not {nested!r}.")
    outer = ("eos_token_id", "bos_token_id", "tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")
    return {name: fields[name] for name in outer if fields.get(name) is not None} | nested


def _load_directory(directory: Path, *, dtype: torch.dtype, device: torch.device, kernels: bool, bits: Bits | None) -> Decoder:
    arch, config = _directory_config(directory)
    source = SafetensorsSource(directory)  # before the model: a missing file is told at once

    def left_out(name: str) -> bool:
        tied_copy = config.tie_word_embeddings and name.endswith("lm_head.weight")
        other_modes = name.removeprefix("model.").startswith(("vision_tower.", "multi_modal_projector."))
        return tied_copy or other_modes or name.endswith("rotary_emb.inv_freq")

    def rename(name: str) -> str:
        return name.removeprefix("language_model.").replace("model.language_model.", "model.", 1)

    if kernels:
        packed = PackedDecoder(config, dtype)
        names = match_names(packed, source, table=arch.hf_names, rename=rename, left_out=left_out)
        fill_packed(packed, _packed_source(source, dtype, bits, names), names, norm_offset=arch.norm_offset)
        return packed
    model = Decoder(config, dtype=dtype, device=device)
    load_weights(model, source, table=arch.hf_names, norm_offset=arch.norm_offset, rename=rename, left_out=left_out)
    return model
