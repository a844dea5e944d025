"""Models of ten families that nothing here was tuned for: one half to fit on, one to report on.

In: a name and a batch size. Out: a `Workload`. What is learnt from the first half (`DEVELOPMENT`) may change Remat; the
second (`REPORTED`) is only ever looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.frontier.workloads import LossInside, Model, Workload
from torch import Tensor, nn

CLASSES = 1000
SAMPLE_RATE = 16_000


def images(batch: int, *, family: str, side: int = 224, **sizes: Any) -> Workload:
    """A classifier of images of that family, as transformers names it."""
    made = _from_config(family, "ForImageClassification", num_labels=CLASSES, **sizes)
    return Workload(made, torch.randn(batch, 3, side, side), torch.randint(CLASSES, (batch,)))


def decoder(batch: int, *, family: str, length: int, vocabulary: int, **sizes: Any) -> Workload:
    made = _from_config(
        family,
        "ForCausalLM",
        vocab_size=vocabulary,
        max_position_embeddings=length,
        **{"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None, "use_cache": False, **sizes},
    )
    tokens = torch.randint(vocabulary, (batch, length))
    return Workload(made, tokens, tokens)


def masked(batch: int, *, family: str, length: int, vocabulary: int, **sizes: Any) -> Workload:
    tokens = {f"{name}_token_id": place for place, name in enumerate(("pad", "bos", "eos", "cls", "sep"))}
    made = _from_config(
        family, "ForMaskedLM", vocab_size=vocabulary, max_position_embeddings=length, **{**tokens, **sizes}
    )
    inputs = torch.randint(vocabulary, (batch, length))
    return Workload(made, inputs, inputs)


def translator(batch: int, *, family: str, length: int, vocabulary: int, **sizes: Any) -> Workload:
    made = _from_config(
        family, "ForConditionalGeneration", vocab_size=vocabulary, decoder_start_token_id=0, use_cache=False, **sizes
    )
    return Workload(made, *(torch.randint(1, vocabulary, (batch, length)) for _ in range(2)))


def _transcriber(batch: int, *, family: str, frames: int, length: int, vocabulary: int, **sizes: Any) -> Workload:
    """From spectrograms of `frames` to text."""
    made = _from_config(
        family,
        "ForConditionalGeneration",
        vocab_size=vocabulary,
        max_source_positions=frames // 2,
        max_target_positions=length,
        **{"decoder_start_token_id": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        use_cache=False,
        **sizes,
    )
    labels = torch.randint(3, vocabulary, (batch, length))
    return Workload(made, torch.randn(batch, made.model.config.num_mel_bins, frames), labels)


def _speech(batch: int, *, family: str, seconds: float, **sizes: Any) -> Workload:
    """A classifier of sounds, from their waves."""
    made = _from_config(family, "ForSequenceClassification", num_labels=CLASSES, mask_time_prob=0.0, **sizes)
    return Workload(made, torch.randn(batch, int(seconds * SAMPLE_RATE)), torch.randint(CLASSES, (batch,)))


def _from_config(family: str, head: str, **sizes: Any) -> LossInside:
    import transformers

    config = getattr(transformers, f"{family}Config")(**sizes)
    return LossInside(getattr(transformers, f"{family}{head}")(config))


class Residual(nn.Module):
    """Two convolutions with group norms, and a shift by the time embedding between them."""

    def __init__(self, given: int, width: int, times: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.GroupNorm(32, given), nn.GroupNorm(32, width)
        self.first, self.second = (nn.Conv2d(size, width, 3, padding=1) for size in (given, width))
        self.shift = nn.Linear(times, width)
        self.around = nn.Conv2d(given, width, 1) if given != width else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.first(F.silu(self.first_norm(x))) + self.shift(F.silu(time))[:, :, None, None]
        return self.second(F.silu(self.second_norm(y))) + self.around(x)


class ImageAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(32, width), heads
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, width, high, wide = x.shape
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        parts = self.inward(tokens).view(batch, high * wide, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(batch, high * wide, width)
        return x + self.outward(mixed).transpose(1, 2).view_as(x)


class Level(nn.Module):
    def __init__(self, given: int, width: int, times: int, heads: int) -> None:
        super().__init__()
        self.residual = Residual(given, width, times)
        self.attention = ImageAttention(width, heads) if heads else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.attention(self.residual(x, time))


class Denoiser(nn.Module):
    """A diffusion U-Net: what was added to an image, told from the image and the time."""

    def __init__(self, widths: tuple[int, ...], blocks: int, heads: int, attended: int) -> None:
        super().__init__()
        times = 4 * widths[0]
        self.time = nn.Sequential(nn.Linear(1, times), nn.SiLU(), nn.Linear(times, times))
        self.start, self.end = nn.Conv2d(4, widths[0], 3, padding=1), nn.Conv2d(widths[0], 4, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        self.smaller, self.larger = nn.ModuleList(), nn.ModuleList()
        held, width = [widths[0]], widths[0]
        for level, size in enumerate(widths):
            for _ in range(blocks):
                self.down.append(Level(width, size, times, heads if level >= attended else 0))
                width = size
                held.append(width)
            if level + 1 < len(widths):
                self.smaller.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
                held.append(width)
        for level, size in reversed(list(enumerate(widths))):
            for _ in range(blocks + 1):
                self.up.append(Level(width + held.pop(), size, times, heads if level >= attended else 0))
                width = size
            if level:
                self.larger.append(nn.Conv2d(width, width, 3, padding=1))
        self.blocks = blocks

    def forward(self, image: Tensor, noise: Tensor) -> Tensor:
        time = self.time(torch.full((len(image), 1), 0.5, device=image.device))
        x = self.start(image)
        held = [x]
        for number, block in enumerate(self.down):
            x = block(x, time)
            held.append(x)
            level = (number + 1) // self.blocks - 1
            if (number + 1) % self.blocks == 0 and level < len(self.smaller):
                x = self.smaller[level](x)
                held.append(x)
        for number, block in enumerate(self.up):
            x = block(torch.cat([x, held.pop()], dim=1), time)
            level = (number + 1) // (self.blocks + 1) - 1
            if (number + 1) % (self.blocks + 1) == 0 and level < len(self.larger):
                x = self.larger[level](F.interpolate(x, scale_factor=2.0))
        return F.mse_loss(self.end(F.silu(x)).float(), noise)


def _diffusion(batch: int, *, side: int, **sizes: Any) -> Workload:
    return Workload(Denoiser(**sizes), *(torch.randn(batch, 4, side, side) for _ in range(2)))


def model_of(build: Callable[..., Workload], batch: int, parked: int = 20, **sizes: Any) -> Model:
    return Model(partial(build, **sizes), batch, parked)


DEVELOPMENT: Mapping[str, Model] = {
    "convnext-base": model_of(images, 96, family="ConvNext", depths=[3, 3, 27, 3], hidden_sizes=[128, 256, 512, 1024]),
    "vit-large": model_of(
        images,
        96,
        family="ViT",
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
    ),
    "swin-base": model_of(images, 64, family="Swin", embed_dim=128, depths=[2, 2, 18, 2], num_heads=[4, 8, 16, 32]),
    "qwen2-half-billion": model_of(
        decoder,
        8,
        family="Qwen2",
        length=1024,
        vocabulary=151_936,
        hidden_size=896,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        intermediate_size=4864,
        tie_word_embeddings=True,
    ),
    "t5-base": model_of(
        translator, 16, family="T5", length=512, vocabulary=32_128, d_model=768, num_layers=12, num_heads=12, d_ff=3072
    ),
    "whisper-small": model_of(
        _transcriber,
        12,
        family="Whisper",
        frames=3000,
        length=256,
        vocabulary=51_865,
        d_model=768,
        encoder_layers=12,
        decoder_layers=12,
        encoder_attention_heads=12,
        decoder_attention_heads=12,
        encoder_ffn_dim=3072,
        decoder_ffn_dim=3072,
    ),
    "denoiser-64": model_of(_diffusion, 16, side=64, widths=(192, 384, 576), blocks=2, heads=8, attended=1),
}
REPORTED: Mapping[str, Model] = {
    "regnet-y": model_of(
        images, 96, family="RegNet", depths=[2, 5, 14, 2], hidden_sizes=[224, 448, 896, 2240], groups_width=112
    ),
    "deit-base": model_of(
        images,
        128,
        family="DeiT",
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        intermediate_size=3072,
    ),
    "swinv2-small": model_of(
        images,
        64,
        family="Swinv2",
        side=256,
        image_size=256,
        window_size=8,
        embed_dim=96,
        depths=[2, 2, 18, 2],
        num_heads=[3, 6, 12, 24],
    ),
    "mistral-half-billion": model_of(
        decoder,
        8,
        family="Mistral",
        length=1024,
        vocabulary=64_000,
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=4,
        intermediate_size=3584,
    ),
    "modernbert-large": model_of(
        masked,
        24,
        family="ModernBert",
        length=512,
        vocabulary=50_368,
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        intermediate_size=2624,
    ),
    "bart-base": model_of(
        translator,
        24,
        family="Bart",
        length=512,
        vocabulary=50_265,
        d_model=768,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=12,
        decoder_attention_heads=12,
        encoder_ffn_dim=3072,
        decoder_ffn_dim=3072,
    ),
    "wav2vec2-base": model_of(_speech, 16, family="Wav2Vec2", seconds=8.0, hidden_size=768, num_hidden_layers=12),
    "mixtral-small": model_of(
        decoder,
        8,
        family="Mixtral",
        length=512,
        vocabulary=32_000,
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=1024,
        num_local_experts=8,
    ),
    "mamba2-small": model_of(
        decoder,
        8,
        family="Mamba2",
        length=1024,
        vocabulary=32_000,
        hidden_size=768,
        num_hidden_layers=12,
        num_heads=24,
        head_dim=64,
        n_groups=1,
        state_size=64,
    ),
}
MODELS: Mapping[str, Model] = {**DEVELOPMENT, **REPORTED}
