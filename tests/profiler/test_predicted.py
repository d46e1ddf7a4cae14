"""Steps predicted as PyTorch's allocator measures them, of models and batches that take other ways than most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)

import ckptfused
from ckptfused import plan, profile
from ckptfused.simulate.devices import _cpu
from tests.cases import by_turns

pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
]
C, HEADS, VOCABULARY = 64, 4, 300
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": C,
    "intermediate_size": 200,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "use_cache": False,
}


def tokens(rows: int = 3, length: int = 41) -> dict[str, Tensor]:
    ids = torch.randint(5, VOCABULARY, (rows, length))
    return {"input_ids": ids, "labels": ids}


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2))


def tied() -> Any:
    """A model whose peak are the two gradients of the embedding: few tokens, many words."""
    return LlamaForCausalLM(LlamaConfig(**(SIZES | {"vocab_size": 8 * VOCABULARY}), tie_word_embeddings=True))


def bart() -> Any:
    heads = {f"{half}_attention_heads": HEADS for half in ("encoder", "decoder")}
    sizes = {f"{half}_{name}": n for half in ("encoder", "decoder") for name, n in (("layers", 2), ("ffn_dim", 128))}
    return BartForConditionalGeneration(BartConfig(vocab_size=VOCABULARY, d_model=C, **heads, **sizes, use_cache=False))


def t5() -> Any:
    sizes: dict[str, Any] = {"d_model": C, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": HEADS}
    options: dict[str, Any] = {"use_cache": False, "decoder_start_token_id": 0, "dropout_rate": 0.1}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, **sizes, **options))


class Changing(nn.Module):
    """Its input is changed in place, so that what a checkpoint is given has to be copied."""

    def __init__(self, of_view: bool = False) -> None:
        super().__init__()
        self.of_view = of_view
        self.first, self.last = nn.Linear(C, C), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        written = x.view(-1) if self.of_view else x
        written.clamp_(min=0.0)
        return self.last(self.first(x).tanh())


class Attention(nn.Module):
    """Attention whose keys are not as wide as values, or that has no heads: no flash kernel of the CPU takes it."""

    def __init__(self, values: int, heads: int = HEADS) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(C, n) for n in (C, C, values))
        self.out = nn.Linear(values, C)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x) for part in (self.q, self.k, self.v))
        if self.heads:
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        o = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(o.transpose(1, 2).flatten(2) if self.heads else o)


class OfFewKeys(nn.Module):
    """Attention with half as many key heads: those of `kind` "told" PyTorch's kernel spreads over the query heads; one
    key head that nobody speaks of has the probabilities in memory."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.told = kind == "told"
        self.few = HEADS // 2 if self.told else 1
        self.q, self.kv, self.out = nn.Linear(C, C), nn.Linear(C, 2 * self.few * C // HEADS), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2 * self.few, -1)).transpose(1, 2).chunk(2, 1)
        o = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=self.told)
        return x + self.out(o.transpose(1, 2).flatten(2))


class Selecting(nn.Module):
    """Layers of which the rows are those with a label, as a batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Changing() for _ in range(2))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        chosen = x[labels != -100]
        for layer in self.layers:
            chosen = layer(chosen)
        return chosen[: int((labels == 1).sum())].mean()


def deberta() -> Any:
    sizes = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")}
    relative: dict[str, Any] = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16}
    return DebertaV2ForMaskedLM(DebertaV2Config(**sizes, **relative, num_hidden_layers=2))


class Transcribing(nn.Module):
    """A loss of alignments, which keeps what the longest target needs."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(C, 30)

    def forward(self, x: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        steps = torch.full((x.size(1),), x.size(0))
        return nn.functional.ctc_loss(self.out(x).log_softmax(-1), targets, steps, lengths)


def spoken() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(90, 3, C), torch.randint(1, 30, (3, 25)), torch.tensor([11, 19, 4])


def stack(layer: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(C, C), *(layer() for _ in range(3)))


def padded() -> dict[str, Tensor]:
    batch = tokens()
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 20:] = 0
    return {**batch, "attention_mask": mask}


def packed() -> dict[str, Tensor]:
    return {**tokens(1, 60), "position_ids": torch.cat((torch.arange(25), torch.arange(35)))[None]}


def rows() -> Tensor:
    return torch.randn(4, 50, C)


def some_labels() -> tuple[Tensor, Tensor]:
    labels = torch.full((4, 50), -100)
    labels[:, ::3], labels[:, ::6] = 0, 1
    return rows(), labels


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "padded": (llama, padded),
    "packed": (llama, packed),
    "o as q lies": (lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)), tokens),
    "LayerDrop": (bart, tokens),
    "tied embeddings": (tied, lambda: tokens(1, 8)),
    "bias with a gradient": (t5, lambda: tokens(1, 31)),
    "in place": (lambda: stack(Changing), rows),
    "in place, of a view": (lambda: stack(lambda: Changing(True)), rows),
    "values": (lambda: stack(lambda: Attention(32)), rows),
    "no heads": (lambda: stack(lambda: Attention(C, 0)), rows),
    "key heads in groups": (lambda: stack(lambda: OfFewKeys("told")), rows),
    "one key head": (lambda: stack(lambda: OfFewKeys("untold")), rows),
    "selecting": (Selecting, some_labels),
    "relative positions": (deberta, tokens),
    "alignments": (Transcribing, spoken),
}


RUNS = by_turns(CASES, ["converted", "plain"]) + [(case, "checkpointed") for case in CASES]


@pytest.mark.parametrize(("case", "how"), RUNS)
def test_as_measured(case: str, how: str) -> None:
    torch.manual_seed(0)
    make, batch_of = CASES[case]
    model, batch = make().train(), batch_of()
    if how == "converted":
        ckptfused.convert(model)
    elif how == "checkpointed":
        if not hasattr(model, "gradient_checkpointing_enable"):
            pytest.skip("transformers' models have a switch")
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    predicted, measured = profile(model, batch, device="cpu"), profile(model, batch)
    assert predicted.notes == ()
    assert predicted.saved == pytest.approx(measured.saved, rel=0.003)
    assert predicted.peak == pytest.approx(measured.peak, rel=0.03)  # what ops allocate within themselves


class Dropping(nn.Module):
    """Half of its layers run, drawn anew in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Changing() for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x.clone()) if torch.rand(()) < 0.5 else x
        return x.mean()


@pytest.mark.slow
def test_models_of_speech() -> None:
    """Wav2Vec2's loss of alignments, whose targets are padded, as the allocator has it; and one for a GPU."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": C, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 32}
    convolutions = {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_conv_pos_embeddings": 16}
    options: dict[str, Any] = {"num_attention_heads": HEADS, "num_conv_pos_embedding_groups": 4, "layerdrop": 0.0}
    model = Wav2Vec2ForCTC(Wav2Vec2Config(**sizes, **convolutions, **options)).train()
    labels = torch.randint(1, 32, (2, 8))
    labels[0, 5:] = -100
    batch = {"input_values": torch.randn(2, 1000), "labels": labels}
    assert profile(model, batch, device="cpu").peak == pytest.approx(profile(model, batch).peak, rel=0.03)
    assert plan(model, batch, "1GiB", device="h200").peak > 0


def test_tokens_without_data_are_not_looked_at_for_a_warning() -> None:
    batch = {name: t.to("meta") for name, t in tokens().items()}
    assert profile(deberta().train(), batch, device="h200").notes == ()


@pytest.mark.slow
def test_steps_draw_alike() -> None:
    """All steps of a profile, measured or predicted, take the same way; none leaves the generator elsewhere."""
    torch.manual_seed(1)
    model, x = Dropping(), torch.randn(50, C, requires_grad=True)
    state = torch.get_rng_state()
    _cpu.cache_clear()
    measured, predicted = profile(model, x), profile(model, x, device="cpu")
    plan(model, x, "1GiB", torch.optim.AdamW, "cpu")
    assert torch.equal(torch.get_rng_state(), state)
    assert [layer.saved for layer in predicted.layers] == [layer.saved for layer in measured.layers]
    assert {layer.saved > 0 for layer in measured.layers} == {False, True}
