"""What the libraries are given to train: small enough for one core, large enough for activations to matter."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

WIDTH, CLASSES, WORDS, LENGTH = 32, 10, 64, 32


class Net(nn.Module):
    """Residual blocks and a loss."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(blocks)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, samples: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            samples = samples + block(samples)
        return functional.cross_entropy(self.head(samples), labels)


def samples(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, WIDTH, generator=generator), torch.randint(CLASSES, (count,), generator=generator)


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Random words, the same at each place in each run."""

    def __init__(self, count: int = 16) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        if place >= self._count:
            raise IndexError(place)
        words = torch.randint(WORDS, (LENGTH,), generator=torch.Generator().manual_seed(place))
        return {"input_ids": words, "labels": words}


def small_gpt(transformers: Any) -> Any:
    """A language model with dropout, from the same seed each time."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=WIDTH, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)
