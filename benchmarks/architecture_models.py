"""Small random models in float64 and without dropout: transformers' decoders, and its encoders and towers."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.architecture_sizes import SINGLE, smaller

TOKENS = 12
MOST = 10**7
"""Parameters of a model: more are those of a configuration that was not shrunk."""
SAMPLES = 4_000
"""The length of a sound wave: twelve frames."""
ENCODERS = (
    "albert.AlbertModel aimv2.Aimv2VisionModel audio_spectrogram_transformer.ASTModel bart.BartEncoder beit.BeitModel "
    "bert.BertModel chinese_clip.ChineseCLIPVisionModel clip.CLIPTextModel clip.CLIPVisionModel "
    "convbert.ConvBertModel deberta_v2.DebertaV2Model deit.DeiTModel dinov2.Dinov2Model "
    "dinov2_with_registers.Dinov2WithRegistersModel dinov3_vit.DINOv3ViTModel distilbert.DistilBertModel "
    "electra.ElectraModel ernie.ErnieModel esm.EsmModel eurobert.EuroBertModel hubert.HubertModel ijepa.IJepaModel "
    "internvl.InternVLVisionModel layoutlm.LayoutLMModel m2m_100.M2M100Encoder marian.MarianEncoder "
    "mbart.MBartEncoder mlcd.MLCDVisionModel mobilebert.MobileBertModel modernbert.ModernBertModel "
    "mpnet.MPNetModel nomic_bert.NomicBertModel nystromformer.NystromformerModel pegasus.PegasusEncoder "
    "pixtral.PixtralVisionModel qwen2_audio.Qwen2AudioEncoder roberta.RobertaModel siglip.SiglipTextModel "
    "siglip.SiglipVisionModel squeezebert.SqueezeBertModel swin.SwinModel t5.T5EncoderModel umt5.UMT5EncoderModel "
    "unispeech.UniSpeechModel videomae.VideoMAEModel vit.ViTModel vit_mae.ViTMAEModel vit_msn.ViTMSNModel "
    "voxtral.VoxtralEncoder wav2vec2.Wav2Vec2Model wav2vec2_conformer.Wav2Vec2ConformerModel wavlm.WavLMModel "
    "whisper.WhisperEncoder xlm.XLMModel xlm_roberta.XLMRobertaModel yolos.YolosModel"
)
"""Encoders and towers of transformers, by module and class."""


class Subject(NamedTuple):
    """One model: how it is made, and the loss of a batch."""

    name: str
    kind: str
    make: Callable[[], nn.Module]
    loss: Callable[[Any], Tensor]


def decoders() -> Iterator[Subject]:
    """The causal language models that transformers knows, those of text alone."""
    import transformers
    from transformers.models.auto import modeling_auto

    found: set[str] = set()
    for name, kind in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if name not in transformers.CONFIG_MAPPING or kind in found:
            continue
        config = transformers.CONFIG_MAPPING[name]
        if not {"text_config", "decoder", "audio_encoder"} & {*getattr(config, "sub_configs", {})}:
            found.add(kind)
            yield Subject(name, kind, partial(_decoder, name, kind), _next_token)


def encoders() -> Iterator[Subject]:
    """Encoders and towers of transformers, each without what stands around it."""
    for path in ENCODERS.split():
        name, _, kind = path.partition(".")
        yield Subject(name, kind, partial(_encoder, name, kind), _weighted)


def randomized(model: Any, dtype: torch.dtype = torch.float64) -> Any:
    """A model in training whose weights are random."""
    model = model.to(dtype).train()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter) * (0.1 if parameter.dim() < 2 else parameter.shape[-1] ** -0.5)
            parameter.copy_(parameter + noise if parameter.dim() < 2 else noise)
    return model


def of_values(y: Tensor) -> Tensor:
    """A loss of a model's result, to which each value adds in its own way."""
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return (y.double() * weights).mean() + y.double().square().mean()


def tokens_of(batch: int = 2) -> Tensor:
    return torch.randint(3, 90, (batch, TOKENS), generator=torch.Generator().manual_seed(1))


def values_of(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _decoder(name: str, kind: str) -> Any:
    import transformers

    config = smaller(transformers.CONFIG_MAPPING[name], name)
    config._experts_implementation = "eager"
    return _made(getattr(transformers, kind), config, torch.float32 if name in SINGLE else torch.float64)


def _encoder(name: str, kind: str) -> Any:
    made: Any = getattr(importlib.import_module(f"transformers.models.{name}.modeling_{name}"), kind)
    return _made(made, smaller(made.config_class, name, decoder=False), torch.float64)


def _made(made: Any, config: Any, dtype: torch.dtype) -> Any:
    """A model of a configuration. **Raises** whatever building it does."""
    with torch.device("meta"):
        size = sum(p.numel() for p in made(copy.deepcopy(config)).parameters())
    if size > MOST:
        raise ValueError(f"{size:,} parameters")
    torch.manual_seed(0)
    try:
        config._attn_implementation = "sdpa"
        model = made(config)
    except ValueError:
        config._attn_implementation = "eager"
        model = made(config)
    return randomized(model, dtype)


def _next_token(model: Any) -> Tensor:
    tokens = tokens_of()
    logits = model(input_ids=tokens, use_cache=False).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), tokens[:, 1:].flatten())


def _weighted(model: Any) -> Tensor:
    made = model(**{model.main_input_name: _input(model.main_input_name, model.config)})
    return of_values(made.last_hidden_state if hasattr(made, "last_hidden_state") else made[0])


def _input(name: str, config: Any) -> Tensor:
    """What an encoder takes: tokens, pixels, samples, or a spectrogram."""
    if name == "input_ids":
        return tokens_of()
    if name == "pixel_values":
        size = config.image_size
        frames = (config.num_frames,) if hasattr(config, "num_frames") else ()
        return values_of(2, *frames, config.num_channels, *((size, size) if isinstance(size, int) else size))
    if name == "input_values" and not hasattr(config, "conv_stride"):
        return values_of(2, config.max_length, config.num_mel_bins)
    if name == "input_values":
        return values_of(2, SAMPLES)
    return values_of(2, config.num_mel_bins, 2 * config.max_source_positions)
