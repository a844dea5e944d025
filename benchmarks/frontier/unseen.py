"""Models of families that nothing else here trains, of a size at which any machine goes through their compiled plans.

Large enough that it matters what a kernel keeps: a layer has some MiB. Nothing was measured on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.frontier.families import decoder, images, masked, model_of, translator
from benchmarks.frontier.workloads import Model

TEXT = dict(length=256, vocabulary=8192)
WIDTH = dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=8)
LAYERS = dict(**WIDTH, intermediate_size=768)
GROUPED = dict(num_key_value_heads=2)
STAGES = dict(depths=[2, 2, 4, 2], hidden_sizes=[32, 64, 128, 256])


def _images(family: str, **sizes: Any) -> Model:
    return model_of(images, 16, family=family, side=128, **sizes)


def _decoder(family: str, **sizes: Any) -> Model:
    return model_of(decoder, 8, family=family, **{**TEXT, **LAYERS, **sizes})


def _masked(family: str, **sizes: Any) -> Model:
    return model_of(masked, 16, family=family, **{**TEXT, **LAYERS, **sizes})


def _translator(family: str, **sizes: Any) -> Model:
    return model_of(translator, 8, family=family, **{**TEXT, **sizes})


HALVES = dict(
    d_model=256,
    **dict(encoder_layers=3, decoder_layers=3, encoder_attention_heads=8, decoder_attention_heads=8),
    **dict(encoder_ffn_dim=768, decoder_ffn_dim=768),
)
UNSEEN: Mapping[str, Model] = {
    "convnextv2": _images("ConvNextV2", **STAGES),
    "mobilenetv1": _images("MobileNetV1", depth_multiplier=1.0, image_size=128),
    "mobilenetv2": _images("MobileNetV2", depth_multiplier=1.0, image_size=128),
    "efficientnet": _images(
        "EfficientNet", width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280, image_size=128
    ),
    "mobilevit": _images("MobileViT", image_size=128),
    "mobilevitv2": _images("MobileViTV2", image_size=128),
    "poolformer": _images("PoolFormer", depths=[2, 2, 4, 2]),
    "regnet": _images("RegNet", depths=[1, 2, 4, 2], hidden_sizes=[64, 128, 256, 512], groups_width=32),
    "segformer": _images("Segformer"),
    "pvt": _images("PvtV2", image_size=128, depths=[2, 2, 2, 2]),
    "cvt": _images("Cvt", depth=[1, 2, 6]),
    "levit": _images("Levit", image_size=128, depths=[2, 2, 2]),
    "focalnet": _images("FocalNet", image_size=128, embed_dim=64, depths=[2, 2, 4, 2]),
    "dinov2": _images(
        "Dinov2", image_size=128, patch_size=8, hidden_size=256, num_hidden_layers=6, num_attention_heads=8
    ),
    "beit": _images("Beit", image_size=128, patch_size=8, use_relative_position_bias=True, **LAYERS),
    "swin": _images("Swin", image_size=128, embed_dim=48, depths=[2, 2, 4, 2], window_size=4),
    "resnet": _images("ResNet", embedding_size=32, **{**STAGES, "hidden_sizes": [64, 128, 256, 512]}),
    "bit": _images("Bit", depths=[2, 2, 3, 2], hidden_sizes=[64, 128, 256, 512], embedding_size=32),
    "gemma2": _decoder("Gemma2", head_dim=32, **GROUPED),
    "qwen3": _decoder("Qwen3", head_dim=32, **GROUPED),
    "olmo2": _decoder("Olmo2", **GROUPED),
    "falcon": _decoder("Falcon", new_decoder_architecture=False, parallel_attn=True),
    "opt": _decoder("OPT", ffn_dim=768, word_embed_proj_dim=256),
    "phi3": _decoder("Phi3", **GROUPED),
    "gpt-neox": _decoder("GPTNeoX"),
    "stablelm": _decoder("StableLm", **GROUPED),
    "cohere": _decoder("Cohere", **GROUPED),
    "bloom": _decoder("Bloom", n_layer=4, n_head=8),
    "mixtral": _decoder("Mixtral", num_local_experts=4, **GROUPED),
    "qwen2-moe": _decoder("Qwen2Moe", num_experts=8, moe_intermediate_size=192, shared_expert_intermediate_size=256),
    "roberta": _masked("Roberta"),
    "albert": _masked("Albert", embedding_size=64),
    "electra": _masked("Electra", embedding_size=64),
    "deberta": _masked("DebertaV2", relative_attention=True, pos_att_type="p2c|c2p"),
    "t5": _translator("T5", d_model=256, d_kv=32, num_layers=4, num_heads=8, d_ff=768),
    "pegasus": _translator("Pegasus", max_position_embeddings=256, **HALVES),
    "mbart": _translator("MBart", max_position_embeddings=256, **HALVES),
}
