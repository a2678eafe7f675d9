"""Filling a Decoder from a checkpoint, strictly both ways: every parameter is found, every tensor is used or knowingly left out.

Files are memory-mapped; each tensor is converted into its place in the (possibly fused) parameter, so that the peak is the model plus
one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.errors import ModelLoadError
from headrace.models.decoder import Decoder
from headrace.models.end_tokens import read_json
from headrace.models.gguf import GGUFFile
from headrace.models.registry import Architecture, NameTable

_NAMES_SHOWN = 8


class WeightSource(Protocol):
    """Named tensors of a checkpoint."""

    where: str

    def names(self) -> set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def load(self, name: str) -> Tensor: ...


class SafetensorsSource:
    """One model.safetensors, or the shards that model.safetensors.index.json names. Never reads pickled weights."""

    def __init__(self, directory: Path) -> None:
        self.where = str(directory)
        self._files = [self._open(path) for path in _safetensors_files(directory)]
        self._file_of = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118 - not a dict

    def names(self) -> set[str]:
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def load(self, name: str) -> Tensor:
        return self._file_of[name].get_tensor(name)

    @staticmethod
    def _open(path: Path) -> safe_open:
        try:
            return safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path}: torn or not a safetensors file ({error}). Fetch it again.") from error


def _safetensors_files(directory: Path) -> list[Path]:
    index = read_json(directory / "model.safetensors.index.json")
    if index:
        shards = index.get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise ModelLoadError(f"{directory / 'model.safetensors.index.json'}: has no weight_map of names. Fetch it again.")
        files = [directory / name for name in sorted(set(shards.values()))]
        for file in files:
            if file.parent != directory:
                raise ModelLoadError(f"{directory / 'model.safetensors.index.json'}: shard {file.name!r} lies outside the directory.")
            if not file.is_file():
                raise ModelLoadError(f"{file}: this shard of the model is missing. Fetch the model again.")
        return files
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    others = sorted(directory.glob("*.safetensors"))
    if len(others) == 1:
        return others
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
    if pickled:
        raise ModelLoadError(
            f"{directory}: has only pickled weights ({pickled[0]}), which can run code and are never opened. "
            "Fetch a safetensors or GGUF version of the model, or convert it with save_pretrained()."
        )
    raise ModelLoadError(f"{directory}: has no model.safetensors and no index of shards. Fetch the model again.")


class GGUFSource:
    """Weights of a GGUF file, with q and k rows in the order of Hugging Face checkpoints."""

    def __init__(self, file: GGUFFile, arch: Architecture, *, num_heads: int, num_kv_heads: int) -> None:
        self.where = str(file.path)
        self.file = file
        self._heads = {"attn_q": num_heads, "attn_k": num_kv_heads} if arch.gguf_permuted else {}

    def names(self) -> set[str]:
        """All but the factors of a scaled rotation, which are settings."""
        return {name for name in self.file.tensors if not name.startswith(("rope_freqs.", "rope_factors_"))}

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.file.tensors[name].shape)

    def load(self, name: str) -> Tensor:
        """float32, in the tensor's shape."""
        return self._in_order(name, self.file.dequantize(name))

    def load_rows(self, name: str) -> Tensor:
        """The blocks of a matrix: uint8 [rows, bytes of a row]."""
        return self._in_order(name, self.file.rows(name))

    def _in_order(self, name: str, rows: Tensor) -> Tensor:
        heads = self._heads.get(name.split(".")[-2]) if name.startswith("blk.") else None
        return rows if heads is None else _unpermute(rows, heads)


def _unpermute(rows: Tensor, num_heads: int) -> Tensor:
    """Rows of a head go from pairs side by side (x0 y0 x1 y1 ..) to halves (x0 x1 .. y0 y1 ..)."""
    return rows.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).reshape(rows.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A checkpoint tensor's place: the rows first .. of a parameter."""

    parameter: str
    first: int


def load_weights(
    model: Decoder,
    source: WeightSource,
    *,
    table: NameTable,
    norm_offset: float = 0.0,
    rename: Callable[[str], str] = lambda name: name,
    left_out: Callable[[str], bool] = lambda name: False,
) -> None:
    """Fill every parameter of `model`.

    `table`: module -> checkpoint tensors (models.registry), in the names that `rename` gives the source's. `left_out`: source names
    that are no weights of the model. `norm_offset`: added to every norm weight. Raises ModelLoadError that names what is missing,
    unknown or of a wrong shape.
    """
    parameters = dict(model.named_parameters())
    for parameter_name, names in match_names(model, source, table=table, rename=rename, left_out=left_out).items():
        parameter = parameters[parameter_name]
        first = 0
        for name in names:
            tensor = source.load(name)
            last = first + (tensor.shape[0] if tensor.dim() else 0)
            if tensor.dim() != parameter.dim() or tensor.shape[1:] != parameter.shape[1:] or last > parameter.shape[0]:
                raise wrong_shape(source.where, name, tensor.shape, parameter)
            target = parameter[first:last]
            target.copy_(tensor)
            if norm_offset and "norm" in parameter_name:
                target += norm_offset
            first = last
        if first != parameter.shape[0]:
            raise wrong_shape(source.where, " + ".join(names), (first, *parameter.shape[1:]), parameter)


def match_names(
    model: Decoder,
    source: WeightSource,
    *,
    table: NameTable,
    rename: Callable[[str], str] = lambda name: name,
    left_out: Callable[[str], bool] = lambda name: False,
) -> dict[str, list[str]]:
    """Parameter of `model` -> the source's tensors that are stacked into it. Arguments and errors as those of `load_weights`."""
    available = {rename(name): name for name in source.names() if not left_out(name)}
    wanted = _wanted(model, table)
    expected = {name for names in wanted.values() for name in names}
    _check(source.where, "are missing", expected - available.keys())
    _check(source.where, "are not part of this architecture", {available[name] for name in available.keys() - expected})
    return {parameter_name: [available[name] for name in names] for parameter_name, names in wanted.items()}


def wrong_shape(where: str, name: str, shape: Iterable[int], parameter: Tensor) -> ModelLoadError:
    return ModelLoadError(
        f"{where}: tensor {name!r} has the shape {list(shape)}, which doesn't fit a parameter of {list(parameter.shape)}; "
        "config and weights disagree."
    )


def _wanted(model: Decoder, table: NameTable) -> dict[str, list[str]]:
    """Parameter -> the checkpoint tensors that are stacked into it."""
    wanted: dict[str, list[str]] = {}
    for parameter_name, _ in model.named_parameters():
        module, _, leaf = parameter_name.rpartition(".")
        layer = ""
        if module.startswith("layers."):
            _, layer, rest = module.split(".", 2)
            module = f"layers.{{}}.{rest}"
        wanted[parameter_name] = [f"{name.format(layer)}.{leaf}" for name in table[module]]
    return wanted


def _check(where: str, what: str, names: Iterable[str]) -> None:
    ordered = sorted(names)
    if ordered:
        more = f" and {len(ordered) - _NAMES_SHOWN} more" if len(ordered) > _NAMES_SHOWN else ""
        raise ModelLoadError(f"{where}: tensors {what}: {', '.join(ordered[:_NAMES_SHOWN])}{more}.")
