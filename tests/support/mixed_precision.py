"""A small transformer with fp32 islands, and a training loop with a GradScaler in which chosen steps overflow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from tests.support.steps import same_bits
from torch import nn

WIDTH, HEADS, LENGTH, WORDS = 16, 2, 16, 29
OVERFLOWS = (0, 3, 4, 40, 41, 73, 99)
"""Seven of a hundred steps: the first, some in a row, the last."""
Sample = tuple[torch.Tensor, torch.Tensor]
Wrap = Callable[[Any, Any], Any]
"""Makes of a module or function, and the optimizer, what is called in its place."""


class Block(nn.Module):
    """Attention whose softmax is in fp32 by hand, norms that autocast leaves there, and a gate that switches it off."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mixed(self.before(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = (query @ key.mT).float().softmax(-1).to(value.dtype)
        x = x + F.dropout(self.out((scores @ value).transpose(1, 2).flatten(-2)), self.dropout, self.training)
        with torch.autocast(x.device.type, enabled=False):
            gate = torch.sigmoid(self.gate(x.float()))
        return x + gate * self.down(F.gelu(self.up(self.between(x))))


class Net(nn.Module):
    """Tied words: the embedding's weight is read in fp32 by the lookup and cast for the head."""

    def __init__(self, depth: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, words: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        hidden = self.words(words)
        for block in self.blocks:
            hidden = block(hidden)
        logits = F.linear(self.norm(hidden), self.words.weight)
        losses = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), words[:, 1:].flatten(), reduction="none")
        return (losses * weight).mean()


def build(depth: int = 3, dropout: float = 0.1) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net(depth, dropout)


@dataclass(slots=True)
class Trained:
    """What a run left behind, step by step."""

    weights: list[torch.Tensor]
    """Of all parameters together, before the first step and after each."""
    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    """As the update got them: unscaled and clipped."""
    scales: list[float] = field(default_factory=list)

    def skipped(self) -> tuple[int, ...]:
        """Steps that changed no weight."""
        return tuple(step for step in range(len(self.losses)) if same_bits(*self.weights[step : step + 2]))

    def differences(self, other: Trained) -> list[str]:
        """What is not the same to the bit, and since when."""
        found = ["scales"] if self.scales != other.scales else []
        for name in ("losses", "gradients", "weights"):
            pairs = zip(getattr(self, name), getattr(other, name), strict=True)
            unequal = [place for place, (left, right) in enumerate(pairs) if not same_bits(left, right)]
            found += [f"{name} since {unequal[0]}"] if unequal else []
        return found


@dataclass(frozen=True, slots=True)
class Loop:
    """How to train: `accumulation` micro-batches a step under autocast to `dtype`, on `device`."""

    dtype: torch.dtype = torch.float16
    accumulation: int = 1
    steps: int = 100
    overflows: tuple[int, ...] = OVERFLOWS
    device: str = "cpu"
    learning_rate: float = 1e-2
    batch: int = 4

    def run(self, net: nn.Module, wrap: Wrap = lambda call, optimizer: call, *, wraps_step: bool = False) -> Trained:
        """Train `net`, calling what `wrap` makes of it, or of the whole step."""
        optimizer = torch.optim.AdamW(net.parameters(), lr=self.learning_rate)
        scaler = torch.amp.GradScaler(self.device, init_scale=2.0**10, growth_interval=9)
        call = net if wraps_step else wrap(net, optimizer)

        def train(batch: Sequence[Sample]) -> torch.Tensor:
            optimizer.zero_grad()
            losses = [self._backward(call, sample, scaler) for sample in batch]
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            return torch.stack(losses)

        step, found = wrap(train, optimizer) if wraps_step else train, Trained([_joined(net.parameters())])
        torch.manual_seed(5)
        for number in range(self.steps):
            found.losses.append(step(self._batch(number)).cpu())
            found.gradients.append(_joined(item.grad for item in net.parameters()))
            found.scales.append(scaler.get_scale())
            found.weights.append(_joined(net.parameters()))
        return found

    def _backward(self, call: Any, sample: Sample, scaler: torch.amp.GradScaler) -> torch.Tensor:
        with torch.autocast(self.device, self.dtype):
            loss = call(*sample) / self.accumulation
        scaler.scale(loss).backward()
        return loss.detach()

    def _batch(self, step: int) -> list[Sample]:
        """Words, and the weight of their loss: in chosen steps so large that one scaled loss is infinite."""
        return [
            (
                _words(step * self.accumulation + part, self.batch).to(self.device),
                torch.tensor(3e38 if step in self.overflows and part == 0 else 1.0, device=self.device),
            )
            for part in range(self.accumulation)
        ]


def _words(seed: int, batch: int) -> torch.Tensor:
    return torch.randint(WORDS, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))


def _joined(tensors: Iterable[Any]) -> torch.Tensor:
    return torch.cat([item.detach().cpu().flatten() for item in tensors])
