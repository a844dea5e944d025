"""The steps that are compared, by name: a model from its configuration, a batch, and the loss inside.

In: a name of `MODELS`, a batch size and a device. Out: a `Workload`, whose module returns the loss and nothing else, in
training mode, with parameters in fp32. Everything is drawn from one seed, so all configurations train the same model.
The "-tiny" ones are for a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.frontier import families
from benchmarks.frontier.workloads import LossInside, Model, Workload
from torch import Tensor, nn

from remat import zoo

SEED = 0
MASKED_SHARE = 0.15
IGNORED = -100
"""The label that cross entropy leaves out."""


class Classifier(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(inputs), labels)


def build(name: str, device: str, batch: int | None = None) -> Workload:
    model = MODELS[name]
    torch.manual_seed(SEED)
    with torch.device(device):
        workload = model.build(batch or model.batch)
    workload.model.train()
    return workload


def _gpt2(batch: int, *, layers: int, width: int, heads: int, vocabulary: int, length: int) -> Workload:
    import transformers

    config = transformers.GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        vocab_size=vocabulary,
        n_positions=length,
        bos_token_id=vocabulary - 1,
        eos_token_id=vocabulary - 1,
        use_cache=False,
    )
    tokens = torch.randint(vocabulary, (batch, length))
    return Workload(LossInside(transformers.GPT2LMHeadModel(config)), tokens, tokens)


def _bert(batch: int, *, layers: int, width: int, heads: int, vocabulary: int, length: int) -> Workload:
    import transformers

    config = transformers.BertConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=heads,
        vocab_size=vocabulary,
        max_position_embeddings=length,
        use_cache=False,
    )
    tokens = torch.randint(vocabulary, (batch, length))
    masked = torch.rand(batch, length) < MASKED_SHARE
    # Which token stands for the mask makes no difference to time or memory.
    inputs, labels = tokens.masked_fill(masked, 1), tokens.masked_fill(~masked, IGNORED)
    return Workload(LossInside(transformers.BertForMaskedLM(config)), inputs, labels)


def _llama(batch: int, *, layers: int, width: int, heads: int, inner: int, vocabulary: int, length: int) -> Workload:
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        vocab_size=vocabulary,
        max_position_embeddings=length,
        tie_word_embeddings=True,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    tokens = torch.randint(vocabulary, (batch, length))
    return Workload(LossInside(transformers.LlamaForCausalLM(config)), tokens, tokens)


def _resnet50(batch: int) -> Workload:
    images, labels = torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,))
    if find_spec("torchvision") is not None:
        import torchvision

        return Workload(Classifier(torchvision.models.resnet50()), images, labels)
    import transformers

    config = transformers.ResNetConfig(num_labels=1000)
    return Workload(LossInside(transformers.ResNetForImageClassification(config)), images, labels)


def _resnet_tiny(batch: int) -> Workload:
    import transformers

    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2], num_labels=10, layer_type="basic"
    )
    model = LossInside(transformers.ResNetForImageClassification(config))
    return Workload(model, torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,)))


def _mlp_tiny(batch: int) -> Workload:
    example = zoo.build("mlp", scale="tiny", device=torch.get_default_device().type, batch=batch, width=32, depth=2)
    return Workload(example.model, *example.args)


def _made(build: Callable[..., Workload], batch: int, parked: int = 32, **sizes: Any) -> Model:
    return Model(partial(build, **sizes), batch, parked)


MODELS: Mapping[str, Model] = {
    "gpt2-medium": _made(_gpt2, 16, layers=24, width=1024, heads=16, vocabulary=50257, length=1024),
    "resnet50": _made(_resnet50, 128),
    "bert-large": _made(_bert, 32, layers=24, width=1024, heads=16, vocabulary=30522, length=512),
    "llama-1b": _made(_llama, 4, 10, layers=16, width=2048, heads=32, inner=8192, vocabulary=128256, length=2048),
    "gpt2-tiny": _made(_gpt2, 8, layers=2, width=64, heads=2, vocabulary=256, length=64),
    "resnet-tiny": _made(_resnet_tiny, 8),
    "bert-tiny": _made(_bert, 8, layers=2, width=64, heads=2, vocabulary=256, length=64),
    "llama-tiny": _made(_llama, 8, layers=2, width=64, heads=4, inner=256, vocabulary=256, length=64),
    "mlp-tiny": _made(_mlp_tiny, 2048),
    **families.MODELS,
}
