"""What the benchmarks run: recipes of models, operations and odd little graphs, by name.

Importing this builds no model, and does not import `transformers`.
"""

from __future__ import annotations

from benchmarks.workloads import (
    cnn,
    decoder,
    encoder_decoder,
    hf_pictures_and_speech,
    hf_texts,
    llama,
    mixture_of_experts,
    mobile_cnn,
    modern_cnn,
    ops,
    overhead,
    recommender,
    recurrent,
    speech_encoder,
    state_space,
    text_encoder,
    unet_block,
    vision_transformer,
)
from kernel_dispatch.bench import Workload

_PLAIN = (
    *text_encoder.WORKLOADS,
    *decoder.WORKLOADS,
    *llama.WORKLOADS,
    *vision_transformer.WORKLOADS,
    *cnn.WORKLOADS,
    *mobile_cnn.WORKLOADS,
    *modern_cnn.WORKLOADS,
    *speech_encoder.WORKLOADS,
    *encoder_decoder.WORKLOADS,
    *mixture_of_experts.WORKLOADS,
    *unet_block.WORKLOADS,
    *state_space.WORKLOADS,
    *recommender.WORKLOADS,
    *recurrent.WORKLOADS,
)
_ALL = (
    *_PLAIN,
    *hf_texts.WORKLOADS,
    *hf_pictures_and_speech.WORKLOADS,
    *ops.WORKLOADS,
    *overhead.WORKLOADS,
)

WORKLOADS: dict[str, Workload] = {workload.name: workload for workload in _ALL}
# Different kinds of work, few enough for `make bench` to end within a quarter of an hour on two
# cores: what is left out resembles one of these, or takes long to compile.
CORE: tuple[str, ...] = (
    "text-encoder",
    "llama-decode",
    "vision-transformer",
    "mobile-cnn",
    "speech-encoder",
    "mixture-of-experts",
    "unet-block",
    "state-space",
    "recommender",
)
