"""Models of `transformers` from config classes, small, with random weights and a batch whose call returns the loss.

Attention of every kind, convolutions, recurrences, experts, encoders with decoders; nothing is downloaded. Eight more
are in `tests/support/models.py`, which the test suite trains under several budgets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import transformers as hf

from remat.zoo import Example

VOCABULARY = 128
TEXT = dict(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=160)


def _tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(VOCABULARY - 8, (batch, length))


def _language(model: type[Any], config: type[Any], length: int = 64, **sizes: Any) -> Example:
    """A model of text that predicts its own tokens."""
    tokens = _tokens(8, length)
    settings = config(**{**TEXT, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **sizes})
    return Example(model(settings), (), {"input_ids": tokens, "labels": tokens})


def _images(model: type[Any], config: Any, side: int = 64) -> Example:
    config.num_labels = 10
    batch = {"pixel_values": torch.randn(8, 3, side, side), "labels": torch.randint(10, (8,))}
    return Example(model(config), (), batch)


def gpt2() -> Example:
    sizes = dict(n_positions=64, n_embd=64, n_layer=3, n_head=4)
    return _language(hf.GPT2LMHeadModel, hf.GPT2Config, **sizes)


def bart() -> Example:
    sizes = dict(d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4)
    more = dict(encoder_ffn_dim=128, decoder_ffn_dim=128, max_position_embeddings=64, decoder_start_token_id=1)
    return _language(hf.BartForConditionalGeneration, hf.BartConfig, **sizes, **more)


def t5() -> Example:
    sizes = dict(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0)
    return _language(hf.T5ForConditionalGeneration, hf.T5Config, **sizes)


def vit() -> Example:
    sizes = {name: size for name, size in TEXT.items() if name != "vocab_size"}
    return _images(hf.ViTForImageClassification, hf.ViTConfig(image_size=64, patch_size=8, **sizes))


def resnet() -> Example:
    config = hf.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 64, 64], depths=[2, 2, 2, 2])
    return _images(hf.ResNetForImageClassification, config)


def convnext() -> Example:
    config = hf.ConvNextConfig(hidden_sizes=[16, 32, 64, 64], depths=[2, 2, 2, 2])
    return _images(hf.ConvNextForImageClassification, config)


def mobilenet() -> Example:
    return _images(hf.MobileNetV2ForImageClassification, hf.MobileNetV2Config(image_size=64, depth_multiplier=0.35))


def swin() -> Example:
    config = hf.SwinConfig(image_size=64, patch_size=4, embed_dim=24, depths=[2, 2], num_heads=[2, 4], window_size=4)
    return _images(hf.SwinForImageClassification, config)


def segformer() -> Example:
    config = hf.SegformerConfig(hidden_sizes=[16, 32, 48, 64], num_attention_heads=[1, 2, 2, 4], depths=[1, 1, 1, 1])
    return _images(hf.SegformerForImageClassification, config)


def clip() -> Example:
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    text = dict(**sizes, vocab_size=VOCABULARY, max_position_embeddings=32, eos_token_id=2)
    config = hf.CLIPConfig(text_config=text, vision_config=dict(**sizes, image_size=64, patch_size=8))
    batch = {"input_ids": _tokens(8, 32), "pixel_values": torch.randn(8, 3, 64, 64), "return_loss": True}
    return Example(hf.CLIPModel(config), (), batch)


def whisper() -> Example:
    config = hf.WhisperConfig(
        **dict(vocab_size=VOCABULARY, d_model=64, encoder_layers=2, decoder_layers=2, num_mel_bins=16),
        **dict(encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128),
        **dict(max_source_positions=64, max_target_positions=64, dropout=0.1, pad_token_id=0, bos_token_id=1),
        **dict(eos_token_id=2, decoder_start_token_id=1),
    )
    batch = {"input_features": torch.randn(8, 16, 128), "labels": _tokens(8, 32)}
    return Example(hf.WhisperForConditionalGeneration(config), (), batch)


def wav2vec2() -> Example:
    sizes = {name: size for name, size in TEXT.items() if name != "vocab_size"}
    config = hf.Wav2Vec2Config(
        **sizes,
        **dict(conv_dim=(32, 32, 32), conv_kernel=(10, 3, 3), conv_stride=(5, 2, 2), num_feat_extract_layers=3),
        **dict(num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, num_labels=10, layerdrop=0.0),
        **dict(apply_spec_augment=False, classifier_proj_size=32),
    )
    batch = {"input_values": torch.randn(4, 4000), "labels": torch.randint(10, (4,))}
    return Example(hf.Wav2Vec2ForSequenceClassification(config), (), batch)


def mamba() -> Example:
    return _language(hf.MambaForCausalLM, hf.MambaConfig, state_size=8)


def _text(model: str, config: str, **sizes: Any) -> Callable[[], Example]:
    return lambda: _language(getattr(hf, model), getattr(hf, config), **sizes)


GROUPED = dict(num_key_value_heads=2)
SMALL_TRANSFORMERS: Mapping[str, Callable[[], Example]] = MappingProxyType(
    {
        "gpt2": gpt2,
        "bert": _text("BertForMaskedLM", "BertConfig"),
        "albert": _text("AlbertForMaskedLM", "AlbertConfig", embedding_size=32),
        "deberta": _text("DebertaV2ForMaskedLM", "DebertaV2Config", relative_attention=True, pos_att_type="p2c|c2p"),
        "llama": _text("LlamaForCausalLM", "LlamaConfig", **GROUPED),
        "mistral": _text("MistralForCausalLM", "MistralConfig", **GROUPED, sliding_window=32),
        "qwen2": _text("Qwen2ForCausalLM", "Qwen2Config", **GROUPED),
        "gemma": _text("GemmaForCausalLM", "GemmaConfig", **GROUPED, head_dim=16),
        "phi": _text("PhiForCausalLM", "PhiConfig"),
        "falcon": _text("FalconForCausalLM", "FalconConfig"),
        "gpt-neox": _text("GPTNeoXForCausalLM", "GPTNeoXConfig"),
        "opt": _text("OPTForCausalLM", "OPTConfig", ffn_dim=160, word_embed_proj_dim=64, max_position_embeddings=64),
        "bloom": _text("BloomForCausalLM", "BloomConfig", n_layer=3, n_head=4),
        "mixtral": _text("MixtralForCausalLM", "MixtralConfig", **GROUPED, num_local_experts=4),
        "mamba": mamba,
        "rwkv": _text("RwkvForCausalLM", "RwkvConfig", context_length=64, length=16),
        "t5": t5,
        "bart": bart,
        "vit": vit,
        "swin": swin,
        "resnet": resnet,
        "convnext": convnext,
        "mobilenet": mobilenet,
        "segformer": segformer,
        "clip": clip,
        "whisper": whisper,
        "wav2vec2": wav2vec2,
    }
)


def build_small_transformer(name: str, seed: int = 0) -> Example:
    """The same model and batch every time."""
    torch.manual_seed(seed)
    example = SMALL_TRANSFORMERS[name]()
    example.model.train()
    return example
