"""Real models from `transformers`, small, built from configs with random weights, dropout on, loss inside."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers as hf

from remat.zoo import Example

VOCABULARY = 128


def _tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, length))


def gpt2() -> Example:
    config = hf.GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=64, n_layer=4, n_head=4)
    tokens = _tokens(16, 64)
    return Example(hf.GPT2LMHeadModel(config), (), {"input_ids": tokens, "labels": tokens})


def bert() -> Example:
    config = hf.BertConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256
    )
    tokens = _tokens(16, 64)
    return Example(hf.BertForMaskedLM(config), (), {"input_ids": tokens, "labels": tokens})


def t5() -> Example:
    config = hf.T5Config(
        vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return Example(hf.T5ForConditionalGeneration(config), (), {"input_ids": _tokens(16, 48), "labels": _tokens(16, 32)})


def vit() -> Example:
    config = hf.ViTConfig(
        image_size=64,
        patch_size=8,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=256,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        num_labels=10,
    )
    batch = {"pixel_values": torch.randn(16, 3, 64, 64), "labels": torch.randint(10, (16,))}
    return Example(hf.ViTForImageClassification(config), (), batch)


def llama() -> Example:
    config = hf.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.1,
    )
    tokens = _tokens(16, 64)
    return Example(hf.LlamaForCausalLM(config), (), {"input_ids": tokens, "labels": tokens})


def mixtral() -> Example:
    config = hf.MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        attention_dropout=0.1,
    )
    tokens = _tokens(16, 64)
    return Example(hf.MixtralForCausalLM(config), (), {"input_ids": tokens, "labels": tokens})


def whisper() -> Example:
    config = hf.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=64,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=64,
        max_target_positions=64,
        num_mel_bins=16,
        dropout=0.1,
        attention_dropout=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    batch = {"input_features": torch.randn(8, 16, 128), "labels": _tokens(8, 32)}
    return Example(hf.WhisperForConditionalGeneration(config), (), batch)


def resnet() -> Example:
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[16, 16, 32, 32], depths=[8, 4, 3, 3], layer_type="basic")
    config.num_labels = 10
    batch = {"pixel_values": torch.randn(16, 3, 64, 64), "labels": torch.randint(10, (16,))}
    return Example(hf.ResNetForImageClassification(config), (), batch)


TRANSFORMERS: dict[str, Callable[[], Example]] = {
    "gpt2": gpt2,
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "llama": llama,
    "mixtral": mixtral,
    "whisper": whisper,
    "resnet": resnet,
}


def build_transformers(name: str) -> Example:
    torch.manual_seed(0)
    example = TRANSFORMERS[name]()
    example.model.train()
    return example
