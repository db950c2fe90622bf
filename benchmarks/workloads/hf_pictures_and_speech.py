"""Picture and speech models of the `transformers` package: from configs, with random weights."""

from __future__ import annotations

import torch

from benchmarks.workloads.cnn import BRANCH_GAIN
from benchmarks.workloads.hf_wrapping import Plain, freeze
from benchmarks.workloads.initial_weights import RELU_GAIN, draw
from benchmarks.workloads.mobile_cnn import BRANCH_GAIN as MOBILE_BRANCH_GAIN
from benchmarks.workloads.pictures import random_picture
from kernel_dispatch.bench import Case, Workload


def hf_vit(small: bool = False) -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    image, width = (32, 32) if small else (224, 768)
    config = ViTConfig(
        image_size=image,
        patch_size=8 if small else 16,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=2 if small else 12,
        num_attention_heads=4 if small else 12,
        num_labels=_classes(small),
        initializer_range=width**-0.5,
    )
    # A softmax does not see a bias of the keys.
    return _picture_case(freeze(ViTForImageClassification(config), "k_proj.bias"), image)


def hf_resnet50(small: bool = False) -> Case:
    from transformers import ResNetConfig, ResNetForImageClassification
    from transformers.models.resnet.modeling_resnet import ResNetBottleNeckLayer

    layout = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 1]} if small else {}
    model = ResNetForImageClassification(ResNetConfig(num_labels=_classes(small), **layout))
    for module in model.modules():
        if isinstance(module, ResNetBottleNeckLayer):
            module.layer[-1].convolution.gain = BRANCH_GAIN
            if not isinstance(module.shortcut, torch.nn.Identity):
                module.shortcut.convolution.gain = 1.0
    return _picture_case(draw(model, RELU_GAIN), 64 if small else 224)


def hf_mobilenet_v2(small: bool = False) -> Case:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification
    from transformers.models.mobilenet_v2.modeling_mobilenet_v2 import MobileNetV2InvertedResidual

    config = MobileNetV2Config(
        depth_multiplier=0.35 if small else 1.0,
        num_labels=_classes(small),
        classifier_dropout_prob=0.0,
    )
    model = MobileNetV2ForImageClassification(config)
    for module in model.modules():
        if isinstance(module, MobileNetV2InvertedResidual):
            module.reduce_1x1.convolution.gain = MOBILE_BRANCH_GAIN if module.use_residual else 1.0
    # The next batch norm takes every shift out again.
    freeze(model, "reduce_1x1.normalization.bias")
    return _picture_case(draw(model, RELU_GAIN), 64 if small else 224)


def hf_convnext_tiny(small: bool = False) -> Case:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    layout = {"num_stages": 2, "hidden_sizes": [16, 32], "depths": [1, 2]} if small else {}
    config = ConvNextConfig(num_labels=_classes(small), layer_scale_init_value=0.4, **layout)
    return _picture_case(draw(ConvNextForImageClassification(config)), 64 if small else 224)


def hf_whisper_encoder(small: bool = False) -> Case:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    bands, positions, width = (8, 12, 32) if small else (80, 1500, 384)
    config = WhisperConfig(
        num_mel_bins=bands,
        max_source_positions=positions,
        d_model=width,
        encoder_layers=2 if small else 4,
        encoder_attention_heads=4 if small else 6,
        encoder_ffn_dim=4 * width,
        init_std=width**-0.5,
    )
    model = Plain(WhisperEncoder(config), ("input_features",), ("last_hidden_state",))
    return Case(model, (torch.randn(1, bands, 2 * positions),))


def _classes(small: bool) -> int:
    return 10 if small else 1000


def _picture_case(model: torch.nn.Module, side: int) -> Case:
    return Case(Plain(model, ("pixel_values",), ("logits",)), (random_picture(side),))


_NEEDS = ("transformers",)

WORKLOADS = (
    Workload(
        "hf-vit",
        hf_vit,
        "transformers' ViT-base: width 768, 12 layers, image of 224x224",
        needs=_NEEDS,
    ),
    Workload(
        "hf-resnet50",
        hf_resnet50,
        "transformers' ResNet-50: image of 224x224, 1000 classes",
        needs=_NEEDS,
    ),
    Workload(
        "hf-mobilenet-v2",
        hf_mobilenet_v2,
        "transformers' MobileNetV2: image of 224x224, 1000 classes",
        needs=_NEEDS,
    ),
    Workload(
        "hf-convnext-tiny",
        hf_convnext_tiny,
        "transformers' ConvNeXt-tiny: image of 224x224, 1000 classes",
        needs=_NEEDS,
    ),
    Workload(
        "hf-whisper-tiny",
        hf_whisper_encoder,
        "transformers' Whisper-tiny encoder: 3000 spectra to 1500 positions",
        needs=_NEEDS,
    ),
)
