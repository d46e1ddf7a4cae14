"""Steps under autocast, predicted and measured; and its rules for meta tensors against PyTorch's, of both devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import ckptfused
from ckptfused import plan, profile
from ckptfused.planner.predicted_steps import UNSEEN
from ckptfused.profiler import Profile
from ckptfused.simulate.autocast_kernels import LOWER, RESULT, WIDEST, autocast_on_meta
from tests.cases import by_turns

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:torch.utils.checkpoint. the use_reentrant:UserWarning"),
]
C, HEADS, WORDS = 64, 4, 300
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": C,
    "intermediate_size": 200,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
}
LOW = torch.bfloat16
KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


def tokens(rows: int = 3, length: int = 41) -> dict[str, Tensor]:
    ids = torch.randint(5, WORDS, (rows, length))
    return {"input_ids": ids, "labels": ids}


def llama(**sizes: Any) -> Any:
    return LlamaForCausalLM(LlamaConfig(**(SIZES | sizes), num_key_value_heads=2, use_cache=False))


def lora() -> Any:
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.1)
    model = peft.get_peft_model(llama(), adapters)
    model.enable_input_require_grads()
    return model


def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_embd=C, n_layer=3, n_head=HEADS, use_cache=False))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(C, HEADS, 200, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Linear(C, 5))


class Convolutions(nn.Module):
    """Odd sizes, a norm of a batch, a weight that is used twice and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(7, 33, 3), nn.BatchNorm1d(33)
        self.twice, self.frozen = nn.Linear(37, 37), nn.Linear(37, 11).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)), inplace=True)
        x = self.twice(self.twice(x).softmax(-1))
        return torch.cat([self.frozen(x), self.frozen(x.float())], -1).logsumexp(-1).mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "llama": (llama, tokens),
    "lora": (lora, tokens),
    "tied": (lambda: llama(vocab_size=2400, tie_word_embeddings=True), lambda: tokens(1, 8)),
    "gpt2": (gpt2, tokens),
    "bert": (
        lambda: BertForSequenceClassification(BertConfig(**SIZES)),
        lambda: {"input_ids": tokens()["input_ids"], "labels": torch.zeros(3, dtype=torch.int64)},
    ),
    "encoder": (encoder, lambda: torch.randn(3, 41, C)),
    "convolutions": (Convolutions, lambda: torch.randn(5, 7, 39)),
}


def made(name: str, way: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    make, batch = MODELS[name]
    model: Any = make().train()
    if way in ("converted", "chunked"):
        ckptfused.convert(model, loss="chunked" if way == "chunked" else None)
    elif way != "plain":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": way == "reentrant"})
        model.enable_input_require_grads()
    return model, batch()


def bytes_of(found: Profile) -> list[tuple[str, int]]:
    return [(part.name, part.saved) for part in found.parts]


# Each model plain or converted, a chunked loss where there is one, both checkpoints of Hugging Face's by turns.
PAIRS: list[Any] = by_turns([name for name in MODELS if name != "convolutions"], ["plain", "converted"])
PAIRS += [("convolutions", "plain")]
PAIRS += [(name, "chunked") for name in ("llama", "lora", "tied", "gpt2")]
PAIRS += [("llama", "checkpointed"), ("bert", "checkpointed"), ("lora", "reentrant"), ("tied", "reentrant")]


@pytest.mark.parametrize(("name", "way"), PAIRS)
def test_as_measured(name: str, way: str) -> None:
    """float16, for which PyTorch's products on most CPUs hold nothing within themselves; bfloat16 saves the same.

    On a CPU with instructions in half precision oneDNN multiplies, and what it may hold is the profile's workspace.
    """
    model, batch = made(name, way)
    found, measured = (profile(model, batch, torch.optim.AdamW, device, torch.float16) for device in ("cpu", None))
    assert all(note.startswith("convolutions hold ") for note in found.notes)
    assert found.autocast == measured.autocast == "float16"
    assert found.saved == pytest.approx(measured.saved, rel=0.003)
    workspace = found.workspace if torch.ops.mkldnn._is_mkldnn_fp16_supported() else 0
    # 3%: what other ops allocate within themselves.
    assert 0.97 * measured.peak <= found.peak + workspace and found.peak <= 1.03 * measured.peak
    assert bytes_of(profile(model, batch, device="cpu", autocast=LOW)) == bytes_of(found)
    # With a loss in chunks what is saved is x alone, which stays in float32.
    assert way == "chunked" or bytes_of(profile(model, batch, device="cpu")) != bytes_of(found)


class Own(nn.Module):
    """A model that turns autocast on for a part of itself, and off again within."""

    def __init__(self, kind: str, on: bool = True) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(C, C) for _ in range(4))
        self.kind, self.on = kind, on

    def forward(self, x: Tensor) -> Tensor:
        x = self.parts[0](x)
        with torch.autocast(self.kind, LOW, enabled=self.on):
            x = self.parts[1](x).tanh()
            with torch.autocast(x.device.type, enabled=False):
                x = self.parts[2](x.float())
            return self.parts[3](x).float().mean()


def test_where_autocast_is_asked_for() -> None:
    """Around the call, as an argument, by the model: once for a step, and none of it stays on."""
    model, x = made("encoder", "plain")
    asked = profile(model, x, device="cpu", autocast="bfloat16")
    with torch.autocast("cpu", LOW):
        around, measured = profile(model, x, device="cpu"), profile(model, x)
        assert torch.is_autocast_enabled("cpu")
        assert profile(model, x, device="h200").autocast == ""  # that of another device
        other = profile(model, x, device="cpu", autocast=torch.float16)
    assert bytes_of(asked) == bytes_of(around) == bytes_of(measured)
    assert asked.peak == around.peak
    assert other.autocast == "float16"
    assert not torch.is_autocast_enabled("cpu")
    own, x = Own("cpu"), torch.randn(9, C)
    assert (
        bytes_of(profile(own, x, device="cpu")) == bytes_of(profile(own, x)) != bytes_of(profile(own, x, device="h200"))
    )
    named = profile(Own("cuda"), x, device="h200")
    assert bytes_of(named) == bytes_of(profile(own, x, device="cpu"))
    assert bytes_of(profile(Own("cuda", on=False), x, device="h200")) != bytes_of(named)
    for wrong in ("bf16", torch.float32):
        with pytest.raises(
            ValueError, match="autocast: expected torch.bfloat16, torch.float16, their names or None, got"
        ):
            profile(model, x, device="cpu", autocast=wrong)


class Checkpointed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False, preserve_rng_state=False)


def test_casts_last_as_long_as_the_region() -> None:
    """A checkpoint's copies of weights are there until forward ends, those of a saving step until backward."""

    def alone(layers: int, way: str) -> int:
        kind = Checkpointed if way == "checkpointed" else nn.Linear
        model = nn.Sequential(*(kind(C, C, bias=False) for _ in range(layers)))
        found = [profile(model, torch.ones(1, C), device=device, autocast=LOW) for device in ("cpu", None)]
        assert found[0].saved == found[1].saved
        return max(sum(peak.parts) for peak in found[0].phases if peak.phase.name.startswith("forward"))

    copy = 2 * C * C
    for way in ("plain", "checkpointed"):
        assert 4 * copy <= alone(6, way) - alone(2, way) < 5 * copy


@pytest.mark.slow
def test_plans() -> None:
    """The peak of a plan is that of the step under autocast with its policy, but for what the CPU's ops hold."""
    model, batch = made("llama", "plain")
    free = profile(model, batch, torch.optim.AdamW, "cpu", LOW)
    budget = int(0.97 * free.peak)
    found = plan(model, batch, budget, torch.optim.AdamW, "cpu", autocast="bfloat16")
    assert found.peak <= budget
    assert found.profile.autocast == "bfloat16"
    assert '"autocast": "bfloat16"' in found.to_json()
    assert "under autocast to bfloat16" in " ".join(str(found).split())
    with torch.autocast("cpu", LOW):
        report = ckptfused.convert(model, budget=budget, batch=batch, optimizer=torch.optim.AdamW, device="cpu")
    assert found.policy.digest in report.notes[0]
    lower, full = (profile(model, batch, torch.optim.AdamW, "cpu", autocast) for autocast in (LOW, None))
    expected, other = (p.peak + p.workspace + p.above_state // UNSEEN for p in (lower, full))
    assert found.peak == expected != other
    with pytest.raises(ValueError, match="autocast: pass budget= with it"):
        ckptfused.convert(model, autocast="bfloat16")


# What PyTorch's own kernels of autocast do is seen without a GPU, too, on its fake tensors.
CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": F.linear,
    "matmul": lambda a, b: a @ b.t(),
    "addmm": lambda a, b: torch.addmm(a, b, a),
    "einsum": lambda a, b: torch.einsum("ij,kj->ik", a, b),
    "tensordot": lambda a, b: torch.tensordot(a, b, 1),
    "bmm": lambda a, b: torch.bmm(a.view(1, 4, 4), b.view(1, 4, 4)),
    "conv1d": lambda a, b: F.conv1d(a.view(1, 4, 4), b.view(4, 4, 1)),
    "attention": lambda a, b: F.scaled_dot_product_attention(*(t.view(1, 1, 4, 4) for t in (a, b, b))),
    "prelu": lambda a, b: F.prelu(a, b.view(-1).narrow(0, 0, 4)),
    "softmax": lambda a, b: a.softmax(-1),
    "softmax in a type": lambda a, b: a.softmax(-1, dtype=LOW),
    "log_softmax": lambda a, b: a.log_softmax(-1),
    "cross_entropy": lambda a, b: F.cross_entropy(a, b.softmax(-1).to(a.dtype)),
    "nll_loss": lambda a, b: F.nll_loss(a, torch.zeros(4, dtype=torch.int64, device=a.device)),
    "mse_loss": F.mse_loss,
    "kl_div": lambda a, b: F.kl_div(a, b, reduction="sum"),
    "with logits": F.binary_cross_entropy_with_logits,
    "layer_norm": lambda a, b: F.layer_norm(a, [4]),
    "rms_norm": lambda a, b: F.rms_norm(a, [4]),
    "group_norm": lambda a, b: F.group_norm(a, 2),
    "sum": lambda a, b: a.sum(),
    "sum of rows": lambda a, b: a.sum(-1),
    "prod": lambda a, b: a.prod(),
    "cumsum": lambda a, b: a.cumsum(0),
    "mean": lambda a, b: a.mean(),
    "norm": lambda a, b: a.norm(),
    "norm of aten": lambda a, b: torch.ops.aten.norm.ScalarOpt_dim(a, 2.0, [0]),
    "vector_norm": lambda a, b: torch.linalg.vector_norm(a),
    "pow": lambda a, b: a.pow(2),
    "rsqrt": lambda a, b: a.rsqrt(),
    "exp": lambda a, b: a.exp(),
    "logsumexp": lambda a, b: a.logsumexp(-1),
    "softplus": lambda a, b: F.softplus(a),
    "cdist": torch.cdist,
    "trace": lambda a, b: a.trace(),
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([a, b]),
    "addcmul": lambda a, b: torch.addcmul(a, b, b),
    "mul": lambda a, b: a * b,
    "gelu": lambda a, b: F.gelu(a),
    "silu": lambda a, b: F.silu(a),
    "cos of a product": lambda a, b: (a.float() @ b.float().t()).cos(),
}


class _Nothing(TorchDispatchMode):
    """A dispatch mode such as a prediction has: below autocast nothing casts."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def pytorchs(kind: str) -> Iterator[str]:
    torch.set_autocast_enabled(kind, True)
    torch.set_autocast_dtype(kind, LOW)
    try:
        with FakeTensorMode():
            yield kind
    finally:
        torch.set_autocast_enabled(kind, False)
        torch.set_autocast_dtype(kind, LOW if kind == "cpu" else torch.float16)


@contextlib.contextmanager
def ours(kind: str) -> Iterator[str]:
    with autocast_on_meta(kind), torch.autocast(kind, LOW), _Nothing():
        yield "meta"


@pytest.mark.parametrize("kind", KEYS)
def test_rules_are_pytorchs(kind: str) -> None:
    types = (torch.float32, LOW)
    differ = {}
    for call, function in CALLS.items():
        for a, b in ((a, b) for a in types for b in types):
            found = []
            for way in (pytorchs, ours):
                with way(kind) as device:
                    operands = (torch.empty(4, 4, device=device, dtype=dtype) for dtype in (a, b))
                    try:
                        found.append(str(function(*operands).dtype))
                    except RuntimeError:  # of types that do not fit
                        found.append("an error")
            if found[0] != found[1]:
                differ[call, a, b] = found
    assert differ == {}


@pytest.mark.parametrize("kind", KEYS)
def test_rules_name_what_there_is(kind: str) -> None:
    """PyTorch's ops at the key, and in one table each."""
    tables = [table[kind] for table in (LOWER, WIDEST, RESULT)]
    assert sum(map(len, tables)) == len(set().union(*tables))
    known = {n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")}
    known = {n for n in known if torch._C._dispatch_has_kernel_for_dispatch_key(n, KEYS[kind])}
    assert {f"aten::{name}" for table in tables for name in table} - known == set()
