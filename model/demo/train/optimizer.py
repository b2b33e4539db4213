"""Muon for matrices, Adam for everything else.

Muon (K. Jordan and others, 2024): the momentum of a matrix, made nearly orthogonal by five Newton-Schulz steps; scaled as in "Muon is
scalable for LLM training" (arXiv 2502.16982), so that one learning rate serves both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration


def orthogonal(update: Tensor) -> Tensor:
    """Nearly orthogonal matrices along the last two dimensions: singular values between about 0.7 and 1.2. Any [..., rows, columns]."""
    a, b, c = _COEFFICIENTS
    x = update.to(torch.bfloat16) if update.is_cuda else update.float()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Muon(torch.optim.Optimizer):
    """Matrices [rows, columns] and stacks of them [n, rows, columns]; weight decay is decoupled."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # takes no closure
        for group in self.param_groups:
            alike: dict[tuple[int, ...], list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike.setdefault(tuple(parameter.shape), []).append(parameter)
            for shape, parameters in alike.items():
                # Matrices of one shape go through the iteration together.
                grads = torch.stack([p.grad for p in parameters if p.grad is not None])
                moments = []
                for p in parameters:
                    state = self.state[p]
                    if not state:
                        state["momentum"] = torch.zeros_like(p)
                    moments.append(state["momentum"])
                momentum = torch.stack(moments).lerp_(grads, 1 - MOMENTUM)
                torch._foreach_copy_(moments, list(momentum.unbind(0)))
                update = orthogonal(grads.lerp_(momentum, MOMENTUM)) * (0.2 * max(shape[-2:]) ** 0.5)
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(parameters, list(update.unbind(0)), alpha=-group["lr"])


def is_matrix(name: str) -> bool:
    """Whether Muon takes a parameter: hidden matrices, not embeddings, tables, routers, mHC projections or vectors."""
    if name.endswith((".ffn.experts.up", ".ffn.experts.down")):
        return True
    plain = ("embed.weight", "head.weight", "gate.weight", "weights_proj.weight", "norm.weight")
    return name.endswith(".weight") and not name.endswith(plain)


def optimizers(named: dict[str, nn.Parameter], lr: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Muon and Adam over all parameters but the routers' biases, which are balanced by counting."""
    matrices = [p for name, p in named.items() if is_matrix(name)]
    rest = [p for name, p in named.items() if not is_matrix(name) and not name.endswith(("gate.bias", "gate.bias_vl"))]
    fused = bool(matrices) and matrices[0].is_cuda
    adam = torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=fused)
    return [Muon(matrices, lr, weight_decay), adam]
