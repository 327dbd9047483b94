"""Linear layers for which a few tokens cost hardly more than one: the checkpoint's bf16 weights, fp32 activations and sums.

`fp32_compute_from_bf16(model)` turns a model loaded in bf16 into one that gives the logits of the same checkpoint loaded in
fp32, while its big matrices stay at two bytes a weight. Small things (norms, biases) become fp32; embedding tables stay bf16
and their rows are widened as they are looked up; linear layers, the head included, become `FastLinear`. A head tied to the
embedding gets its own packed copy. Weights that bf16 cannot hold are never rounded: their layers stay as they are, in fp32.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
from torch import nn

from ssd import native
from ssd.engine import linear_kernel as kernel

log = logging.getLogger(__name__)


class FastLinear(nn.Module):
    """`x @ weight.T + bias` for inference: fp32 `[..., in]` to fp32 `[..., out]`, the weight `[out, in]` kept as packed bf16.

    int8: keep the weight, of any type, rounded to a byte a number instead, with a scale for each output.
    """

    words: torch.Tensor
    padded_bias: torch.Tensor
    scales: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, int8: bool = False) -> None:
        super().__init__()
        if weight.ndim != 2:
            raise ValueError(f"weight must be [out, in], got shape {tuple(weight.shape)}")
        if not int8 and not fits_bf16(weight):
            raise ValueError(f"weight ({weight.dtype}) holds numbers that bf16 cannot: keep torch.nn.Linear for it")
        vectors = native.host_vectors()
        lanes, scales = vectors.lanes if vectors else 16, None
        if int8:
            numbers, scales = kernel.quantised(weight)
            words = kernel.pack_bytes(numbers, lanes)
            scales = nn.functional.pad(scales, (0, -len(weight) % (2 * lanes)))
        else:
            words = kernel.pack(weight.detach().to(torch.bfloat16), lanes)
        padded_bias = torch.zeros(words.shape[0] * 2 * lanes, device=weight.device)
        if bias is not None:
            padded_bias[: len(weight)] = bias.detach()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("words", words)
        self.register_buffer("padded_bias", padded_bias)
        self.register_buffer("scales", scales)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs `[..., out]` of activations `[..., in]`; records no gradient."""
        if x.dtype != torch.float32 or x.shape[-1] != self.in_features:
            raise ValueError(
                f"expected float32 activations [..., {self.in_features}], got {x.dtype} {tuple(x.shape)};"
                " for a model loaded in bf16 call fp32_compute_from_bf16"
            )
        if not x.is_cpu or native.why_unavailable():
            return self._with_torch(x)
        out = kernel.matmul(x.contiguous(), self.words, self.padded_bias, self.scales)
        return out if out.shape[-1] == self.out_features else out[..., : self.out_features].contiguous()

    def _with_torch(self, x: torch.Tensor) -> torch.Tensor:
        _say_once(f"FastLinear uses torch on {x.device.type}: {native.why_unavailable() or 'its kernel is for CPUs'}")
        if self.scales is None:
            weight = kernel.unpack(self.words, self.out_features).float()
        else:
            weight = (self.words.mT.flatten(0, 1) * self.scales[:, None])[: self.out_features]
        return nn.functional.linear(x, weight, self.padded_bias[: self.out_features])

    def extra_repr(self) -> str:
        """The sizes, as `torch.nn.Linear` prints them."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


class Bf16Embedding(nn.Module):
    """A table `[entries, width]` kept in bf16 whose rows are looked up as fp32."""

    bits: torch.Tensor

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        # Not a floating tensor to torch, so that casting the model leaves it alone and `model.dtype` says float32.
        # A copy: the table may be a part of a mapped file, which would stay in memory with it.
        self.register_buffer("bits", table.detach().to(torch.bfloat16, copy=True).view(torch.int16))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `[..., width]` of the table for ids `[...]`."""
        return nn.functional.embedding(ids, self.bits.view(torch.bfloat16)).float()


def fits_bf16(weight: torch.Tensor) -> bool:
    """Whether bf16 holds every number of the tensor exactly."""
    return weight.dtype == torch.bfloat16 or torch.equal(weight, weight.to(torch.bfloat16).to(weight.dtype))


def replace_linears(model: nn.Module, *, int8: bool = False) -> int:
    """Replace, in place, the linear layers below `model` whose weights bf16 holds exactly; returns how many. Needs fp32 activations.

    int8: replace all, their weights rounded to a byte each.
    """
    if reason := native.why_unavailable():
        _say_once(f"linear layers stay torch's: {reason}")
        return 0
    left: list[str] = []
    count = _replace(model, lambda name, layer: _fast(name, layer, left, int8))
    if left:
        log.warning("%d linear layers stay torch's (first: %s): their weights are not bf16 numbers on a CPU", len(left), left[0])
    return count


def fp32_compute_from_bf16(model: nn.Module, *, int8: bool = False) -> int:
    """Make `model`, in place, compute in fp32 with its bf16 matrices kept as they are; returns how many linear layers were replaced.

    int8: matrices of any type, but for embeddings, are rounded to a byte a number instead.
    """
    count = replace_linears(model, int8=int8)
    if count:
        _replace(model, _embedding)
    for module in list(model.modules()):
        _widen(module)
    return count


def _replace(model: nn.Module, make: Callable[[str, nn.Module], nn.Module | None]) -> int:
    """Put `make(name, layer)` in the place of each layer for which it is not None, once for a layer that has several places."""
    places = [(name, parent) for name, parent in model.named_modules() if not isinstance(parent, FastLinear | Bf16Embedding)]
    made: dict[nn.Module, nn.Module | None] = {}
    for prefix, parent in places:
        for key, layer in list(parent._modules.items()):
            if layer is None:
                continue
            if layer not in made:
                made[layer] = make(f"{prefix}.{key}".lstrip("."), layer)
            new = made[layer]
            if new is not None:
                parent._modules[key] = new
                layer.register_parameter("weight", None)  # `places` still holds the layer: let its memory go now
    return sum(new is not None for new in made.values())


def _fast(name: str, layer: nn.Module, left: list[str], int8: bool) -> FastLinear | None:
    """The fast twin of a linear layer, or None; layers that are left for their weights are named in `left`."""
    transposed = type(layer).__name__ == "Conv1D" and type(layer).__module__.startswith("transformers.")
    if type(layer) is not nn.Linear and not transposed:
        return None
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, torch.Tensor)
    if not weight.is_cpu or not (int8 or fits_bf16(weight)):
        left.append(name)
        return None
    assert bias is None or isinstance(bias, torch.Tensor)
    fast = FastLinear(weight.T if transposed else weight, bias, int8=int8)
    return fast.train(layer.training)


def _embedding(_: str, layer: nn.Module) -> Bf16Embedding | None:
    """The bf16 twin of a plain embedding loaded in bf16, or None (subclasses may scale their rows)."""
    plain = type(layer) is nn.Embedding and layer.weight.dtype == torch.bfloat16 and layer.max_norm is None
    return Bf16Embedding(layer.weight) if plain and isinstance(layer, nn.Embedding) else None


def _widen(module: nn.Module) -> None:
    """Make the module's own floating parameters and buffers fp32; rotary frequencies that were rounded are computed anew."""
    frequencies = module._buffers.get("inv_freq")
    if frequencies is not None and frequencies.dtype != torch.float32 and hasattr(module, "config"):
        module.__init__(config=module.config)  # type: ignore[misc]
    for parameter in module.parameters(recurse=False):
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_floating_point():
            module._buffers[name] = buffer.float()


@functools.cache
def _say_once(message: str) -> None:
    log.warning(message)
