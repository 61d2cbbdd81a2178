"""A model whose matrices stay in their files: built without them, and read in parts.

For trainer ranks that each hold a share of a model: `build` makes the modules with vectors and buffers only,
`StoredWeights` reads any rows of a matrix, and `streamed` lends the whole model to a forward pass, layer by
layer. `fill` reads all of them onto a GPU, in the format of the file: a CPU needs six seconds to make float32 numbers
of a billion. Which rows a rank holds belongs to `training/parallel/sharding.py`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.model.loading import WRONG_FILES, quiet_transformers

_ONE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class StoredWeights:
    """The tensors of a model's safetensors files, by name."""

    def __init__(self, files: dict[str, str]) -> None:
        """files: tensor -> the file that has it."""
        self._files = files
        self._open: dict[str, Any] = {}
        self.bytes_read = 0
        self.most_held = 0  # bytes of matrices that a forward pass held at once
        self._held = 0

    @classmethod
    def find(cls, path: str) -> StoredWeights | None:
        """The weights of a folder or hub name; None if they are not in safetensors files."""
        from safetensors import safe_open
        from transformers.utils import cached_file

        def cached(name: str) -> str | None:
            file: str | None = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
            return file

        if (single := cached(_ONE_FILE)) is not None:
            with safe_open(single, framework="pt") as file:
                return cls(dict.fromkeys(file.keys(), single))
        if (index := cached(_INDEX)) is None:
            return None
        with open(index, encoding="utf-8") as text:
            places: dict[str, str] = json.load(text)["weight_map"]
        files = {name: cached(name) for name in set(places.values())}
        if None in files.values():
            return None
        return cls({name: str(files[place]) for name, place in places.items()})

    def _slice(self, name: str) -> Any:
        from safetensors import safe_open

        file = self._files[name]
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        return self._open[file].get_slice(name)

    def has(self, name: str, tensor: Tensor) -> bool:
        """Whether a file has this tensor, of its shape, and as floating-point numbers where it is some."""
        if name not in self._files:
            return False
        stored = self._slice(name)
        is_float = "F" in stored.get_dtype()  # F32, BF16, F8_E4M3
        return tuple(stored.get_shape()) == tuple(tensor.shape) and (
            is_float or not tensor.is_floating_point()
        )

    def read(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """A tensor, or some rows and columns of it."""
        part = self._slice(name)
        values: Tensor = part[rows] if columns == slice(None) else part[rows, columns].contiguous()
        self.bytes_read += values.nbytes
        return values

    def close(self) -> None:
        self._open.clear()

    @contextlib.contextmanager
    def streamed(
        self, model: nn.Module, layers: Sequence[nn.Module], device: torch.device
    ) -> Iterator[None]:
        """Let forward passes run inside the context: each of `layers` has its matrices while it runs."""
        inside = {id(p) for layer in layers for p in layer.parameters()}
        outside = {n: p for n, p in _matrices(model).items() if id(p) not in inside}
        names = {id(parameter): name for name, parameter in _matrices(model).items()}
        hooks: list[Any] = []
        loaded: dict[nn.Module, _LoadedMatrices] = {}

        def load(module: nn.Module, *_: Any) -> None:
            matrices = {names[id(p)]: p for p in module.parameters() if id(p) in names}
            loaded[module] = _LoadedMatrices(self, module, matrices, device)

        def unload(module: nn.Module, *_: Any) -> None:
            loaded.pop(module).unload()

        outer = _LoadedMatrices(self, model, outside, device)
        try:
            for layer in layers:
                hooks.append(layer.register_forward_pre_hook(load))
                hooks.append(layer.register_forward_hook(unload))
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for matrices in (*loaded.values(), outer):
                matrices.unload()

    def hold(self, count: int) -> None:
        self._held += count
        self.most_held = max(self.most_held, self._held)


class _LoadedMatrices:
    """Matrices that are in memory for a while, in the place of parameters without values."""

    def __init__(
        self,
        stored: StoredWeights,
        module: nn.Module,
        empty: dict[str, nn.Parameter],
        device: torch.device,
    ) -> None:
        self._stored, self._owners = stored, []
        values = {
            id(p): nn.Parameter(
                stored.read(name).to(device=device, dtype=p.dtype), requires_grad=False
            )
            for name, p in empty.items()
        }
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if id(parameter) in values:
                    self._owners.append((part, name, parameter))
                    part._parameters[name] = values[id(parameter)]
        self._bytes = sum(value.nbytes for value in values.values())
        stored.hold(self._bytes)

    def unload(self) -> None:
        for part, name, parameter in self._owners:
            part._parameters[name] = parameter
        self._stored.hold(-self._bytes)


def _matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters without values, tied ones once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.is_meta}


def build(
    path: str, *, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
) -> tuple[Any, StoredWeights] | None:
    """A causal LM whose matrices have no values yet, and where they are stored.

    None if the files do not hold exactly the parameters of the model, under their names: such a model is
    loaded whole.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    try:
        stored = StoredWeights.find(path)
        if stored is None:
            return None
        with quiet_transformers():
            config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
            if getattr(config, "quantization_config", None) is not None:
                return None
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(
                    config, dtype=dtype, trust_remote_code=trust_remote_code
                )
            with contextlib.suppress(OSError):  # without a file, it is made from the config
                model.generation_config = GenerationConfig.from_pretrained(path)
    except WRONG_FILES:  # loading the whole model says what is wrong
        return None
    if model._keep_in_fp32_modules or model._keep_in_fp32_modules_strict:
        return None  # parts of such a model have another dtype
    model.tie_weights()
    tensors = {**dict(model.named_parameters()), **persistent_buffers(model)}
    if not all(stored.has(name, tensor) for name, tensor in tensors.items()):
        return None
    _fill_small(model, stored, device)
    return model.eval(), stored


def persistent_buffers(model: Any) -> dict[str, Tensor]:
    """What is no parameter and stands in a model's files all the same, such as a router's correction of its scores."""
    other = {name for name, _ in model.named_non_persistent_buffers()}
    return {name: buffer for name, buffer in model.named_buffers() if name not in other}


def _fill_small(model: Any, stored: StoredWeights, device: torch.device) -> None:
    """Read vectors and buffers, and compute the buffers that are in no file."""
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True  # so that transformers computes nothing but the others
    buffers = persistent_buffers(model)
    for name, buffer in list(model.named_buffers()):
        module, _, last = name.rpartition(".")
        owner = model.get_submodule(module)
        if name in buffers:
            owner._buffers[last] = stored.read(name).to(device=device, dtype=buffer.dtype)
        else:
            owner._buffers[last] = torch.empty_like(buffer, device=device)
    model.initialize_weights()
    vectors = {name: vector for name, vector in model.named_parameters() if vector.ndim < 2}
    _read(model, vectors, stored, device)


def fill(model: nn.Module, stored: StoredWeights, device: torch.device) -> None:
    """Read the matrices that `build` has left out."""
    _read(model, _matrices(model), stored, device)
    stored.close()


def _read(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    stored: StoredWeights,
    device: torch.device,
) -> None:
    """Put parameters with values in the place of these, tied ones too; their format changes on the device."""
    values = {
        id(parameter): nn.Parameter(
            stored.read(name).to(device).to(parameter.dtype), requires_grad=parameter.requires_grad
        )
        for name, parameter in parameters.items()
    }
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if id(parameter) in values:
                module._parameters[name] = values[id(parameter)]
