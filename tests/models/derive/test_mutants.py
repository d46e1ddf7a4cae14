"""A layer that was changed in one place runs as it was written: what is derived of it computes the same, or nothing is
derived."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckptfused
from ckptfused.layer.parts import Reason
from ckptfused.layer.spec_text import Mode
from ckptfused.models.derive import factors
from ckptfused.models.derive.copies import layer_copy
from ckptfused.models.derive.derive import Derivation, derive
from ckptfused.models.derive.prove import leaves_of, proved_call
from ckptfused.models.derive.recording.evaluate import Rest, evaluated
from ckptfused.models.derive.recording.held import tensors_held
from ckptfused.ops.call import Call
from tests.cases import by_turns
from tests.models.derive.coefficients import IN_XIELU, XIELU
from tests.models.derive.experts import EXPERTS, IN_EXPERTS
from tests.models.derive.gates import GATED, IN_GATED
from tests.models.derive.modulated import DIT, IN_JOINT, IN_MODULATED, IN_SINGLE, JOINT, SINGLE
from tests.models.derive.mutations import IN_GPT, IN_LLAMA, IN_WIDE
from tests.models.derive.others import FOLDED, IN_FOLDED, IN_SUMS, IN_TOWER, SUMS, TOWER, called
from tests.models.derive.positions import IN_PUT, IN_SCALED_Q, IN_UNTURNED, PUT, SCALED_Q, UNTURNED
from tests.models.derive.sinks import IN_SCALED, IN_SUNK, LOOK_ALIKE, SCALED, SUNK
from tests.models.derive.tails import IN_TAILED, TAILED
from tests.models.derive.written import GPT, LLAMA, WIDE, arguments, made

T_OF = "T_OF = lambda x: x.shape[1]\n"
DROPPING = range(len(IN_LLAMA), len(IN_LLAMA) + len(IN_GPT))
MUTANTS = [(LLAMA, *change) for change in IN_LLAMA] + [(GPT, *change) for change in IN_GPT]
OTHERS = [
    *((TOWER, *change) for change in IN_TOWER),
    *((SUMS, *change) for change in IN_SUMS),
    *((FOLDED, *change) for change in IN_FOLDED),
    *((DIT, *change) for change in IN_MODULATED),
    *((SINGLE, *change) for change in IN_SINGLE),
    *((JOINT, *change) for change in IN_JOINT),
]
MUTANTS += [(WIDE, *change) for change in IN_WIDE] + [(EXPERTS, *change) for change in IN_EXPERTS]
MUTANTS += IN_GATED
MUTANTS += [(XIELU, *change) for change in IN_XIELU]
MUTANTS += [(SCALED_Q, *change) for change in IN_SCALED_Q]
MUTANTS += [(PUT, *change) for change in IN_PUT]
MUTANTS += [(TAILED, *change) for change in IN_TAILED]
MUTANTS += [(SUNK, *change) for change in IN_SUNK] + [(SCALED, *change) for change in IN_SCALED]


def in_double(source: str) -> str:
    """A text whose norm and softmax compute in double precision, as its neighbourhood."""
    return source.replace(".float()", ".double()").replace("dtype=torch.float32", "dtype=torch.float64")


def outside(layer: nn.Module, args: Any, found: Derivation) -> dict[str, Tensor]:
    """What a derivation takes beside x, by name."""
    given = {**leaves_of(args, {}), **{f"buffer:{name}": t for name, t in tensors_held(layer)}}
    given |= {f"param:{name}": p for name, p in layer.named_parameters()}
    device = torch.device("cpu")
    return given | {name: evaluated(v, given.__getitem__, device) for name, v in found.here.recipes.items()}


def in_order(found: Derivation, call: Call) -> list[Call | Rest]:
    """The op of a layer, and what stands beside it."""
    rest = found.here.rest
    if rest is None:
        return [call]
    return [rest, call] if rest.first else [call, rest]


def check(layer: nn.Module, args: Any) -> bool:
    """Whether something was derived; it then computes, with every gradient, what the layer does."""
    found = derive(layer, args, {})
    if found.proof is None:
        assert found.why
        return False
    if "p_" in found.proof.text:  # it drops whatever its rates are
        return True
    x = args[0].requires_grad_()
    torch.manual_seed(4)
    own = type(layer).forward(layer, *args)
    own = own[0] if isinstance(own, tuple) else own
    call = proved_call(found.layout, layer, x, outside(layer, args, found), Mode())
    assert not isinstance(call, Reason), call
    made, leaves = x, [x, *layer.parameters()]
    for step in in_order(found, call):
        if isinstance(step, Rest):
            torch.manual_seed(4)
            made = step.run(layer, made, *map(outside(layer, args, found).__getitem__, step.given))
        else:
            made = step._replace(x=made).run()
    torch.testing.assert_close(made, own, rtol=1e-9, atol=1e-9, equal_nan=True)
    weights = torch.randn(own.shape, dtype=own.dtype, generator=torch.Generator().manual_seed(3))
    for a, b in zip(*(torch.autograd.grad(y, leaves, weights, allow_unused=True) for y in (own, made)), strict=True):
        zero = torch.zeros(())
        pair = (zero if g is None or not g.any() else g for g in (b, a))
        torch.testing.assert_close(*pair, rtol=1e-8, atol=1e-9, equal_nan=True)
    return True


@pytest.mark.parametrize(("index", "least"), by_turns(range(len(MUTANTS)), [1, factors.LEAST_FACTORED]))
def test_a_mutant_runs_as_written(index: int, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factors, "LEAST_FACTORED", least)
    source, old, new = MUTANTS[index]
    assert source.count(old) >= 1
    layer = made(T_OF + in_double(source.replace(old, new, 1))).double()
    check(layer, arguments(source, tokens=13, dtype=torch.float64))


@pytest.mark.parametrize("made_of", ["torch.empty_like(x)", "torch.zeros_like(x)", "x.clone()"])
def test_a_rotation_that_is_written_part_by_part_is_one(made_of: str) -> None:
    source = PUT.replace("torch.empty_like(x)", made_of)
    layer, args = made(T_OF + in_double(source)).double(), arguments(source, tokens=13, dtype=torch.float64)
    found = derive(layer, args, {})
    assert found.proof is not None, found.why
    assert "attn.rope=half" in found.proof.text
    assert check(layer, args)


def without_first(source: str, first: int, tokens: int = 13) -> Any:
    """A call of a block whose tables leave the first tokens out, in double precision."""
    x, cos, sin, mask = arguments(source, tokens=tokens, dtype=torch.float64)
    return x, cos[: tokens - first], sin[: tokens - first], mask


@pytest.mark.parametrize("first", [1, 5])
@pytest.mark.parametrize("index", range(-1, len(IN_UNTURNED)))
def test_a_mutant_whose_first_tokens_are_not_turned_runs_as_written(index: int, first: int) -> None:
    old, new = IN_UNTURNED[index] if index >= 0 else ("", "")
    assert UNTURNED.count(old) >= 1
    layer = made(T_OF + in_double(UNTURNED.replace(old, new, 1))).double()
    args = without_first(UNTURNED, first)
    assert check(layer, args) or index >= 0
    if index < 0:
        found = derive(layer, args, {})
        assert found.proof is not None and "attn.rope=half" in found.proof.text
        assert check(layer, without_first(UNTURNED, first, tokens=19))


@pytest.mark.parametrize(("source", "first"), [(LLAMA, 0), (UNTURNED, 1), (UNTURNED, 5)])
@pytest.mark.parametrize("table", [1, 2])
def test_later_tables_that_do_not_repeat(source: str, first: int, table: int) -> None:
    """A block reads the first half of what says each cosine or sine twice: others are the layer's own to read."""
    plain = nn.ModuleList([made(in_double(source)).double()])
    converted = copy.deepcopy(plain)
    ckptfused.convert(converted)
    for tokens in (13, 19):
        args = [*without_first(source, first, tokens)]
        if tokens == 19:
            args[table] = torch.rand_like(args[table])
        torch.testing.assert_close(converted[0](*args), plain[0](*args), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("factor", ["q = q * 6**-0.5", "q = 0.4 * q", "k = k * 3", "k = k / 1.7"])
def test_factors_behind_a_rotation_are_one_at_all_shapes(factor: str) -> None:
    """They differ in their last digits."""
    turned = "q, k = turn(q, cos, sin), turn(k, cos, sin)"
    layer = made(in_double(LLAMA.replace(turned, f"{turned}; {factor}"))).double()
    found = derive(layer, without_first(LLAMA, 0), {})
    assert found.proof is not None and found.layout.attn is not None, found.why


@pytest.mark.parametrize("index", range(len(OTHERS)))
def test_a_mutant_of_another_style_runs_as_written(index: int) -> None:
    source, old, new = OTHERS[index]
    assert source.count(old) >= 1
    layer = made(source.replace(old, new, 1)).double()
    args = called(source, tokens=13, dtype=torch.float64)
    with torch.no_grad():
        layer(*args)  # the text is one that runs
    check(layer, args)


@pytest.mark.parametrize("index", DROPPING)
def test_a_mutant_with_dropout_keeps_its_sites(index: int) -> None:
    """The rates of what is derived are those of the calls; what drops elsewhere is not derived."""
    source, old, new = MUTANTS[index]
    layer = made(T_OF + source.replace(old, new, 1), p=0.2)
    found = derive(layer, arguments(source), {})
    if "F.dropout(att, 0.5)" in new:
        assert found.proof is not None and "p_attn=0.5" in found.proof.text
    elif "0.3, True" in new:
        assert found.proof is not None and "p_res=0.3" in found.proof.text.split("ffn.act")[0]
    elif "drop" in new or "bernoulli" in new:
        assert found.proof is None or found.layout.attn is None, found.proof
    elif found.proof is not None:
        assert "p_res=0.2" in found.proof.text
        assert ("p_attn=0.2" in found.proof.text) == (new != "pass" and found.layout.attn is not None)


@pytest.mark.parametrize("source", [LLAMA, GPT, SUNK, SCALED, SCALED_Q])
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_the_originals_are_derived(source: str, p: float) -> None:
    layer = made(source, p=p)
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    found = derive(layer, arguments(source), {})
    assert found.proof is not None, found.why
    assert ("p_attn=0.1" in found.proof.text) == ("p_res=0.1" in found.proof.text) == (p > 0)
    assert ("attn.sinks=1" in found.proof.text) == ("sinks" in source)
    assert ("attn.q_scale=1" in found.proof.text) == (source is SCALED_Q)
    assert check(made(in_double(source)).double(), arguments(source, tokens=21, dtype=torch.float64))
    assert max(found.proof.errors.values()) < 1e-12
    assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items())
    if p == 0:
        assert check(made(in_double(source)).double(), arguments(source, tokens=13, dtype=torch.float64))


@pytest.mark.parametrize(("source", "words"), GATED.values(), ids=GATED)
def test_a_gate_is_derived_in_every_spelling(source: str, words: str) -> None:
    layer = made(in_double(source)).double()
    found = derive(layer, arguments(source, tokens=13, dtype=torch.float64), {})
    assert found.proof is not None and words in found.proof.text, found.why
    assert max(found.proof.errors.values()) < 1e-12
    assert check(layer, arguments(source, tokens=13, dtype=torch.float64))


@pytest.mark.parametrize(("source", "old", "new"), IN_GATED, ids=[new for *_, new in IN_GATED])
def test_what_only_looks_like_a_gate_leaves_the_other_half(source: str, old: str, new: str) -> None:
    layer = made(in_double(source.replace(old, new, 1))).double()
    found = derive(layer, arguments(source, tokens=13, dtype=torch.float64), {})
    assert found.proof is not None and found.layout.ffn is not None, found.why


def test_a_mask_that_is_expanded_to_the_logits_is_derived() -> None:
    """The way of XLM; what is made of the logits' values is no mask."""
    expanded = LLAMA.replace("scores + mask", "scores.masked_fill((mask < -9).expand_as(scores), float('-inf'))")
    chosen = LLAMA.replace("scores + mask", "torch.where((mask >= -9).expand_as(scores), scores, float('-inf'))")
    for source, kind in ((expanded, "drop"), (chosen, "keep")):
        layer = made(in_double(source)).double()
        found = derive(layer, arguments(LLAMA, tokens=13, dtype=torch.float64), {})
        assert found.proof is not None and f"attn.mask={kind}" in found.proof.text, found.why
        assert check(layer, arguments(LLAMA, tokens=13, dtype=torch.float64))
    for other in (
        "(mask + scores < 0).expand_as(scores)",
        "(scores < 0)",
        "(mask < -9).expand_as(scores) | (scores < 0)",
    ):
        layer = made(in_double(expanded.replace("(mask < -9).expand_as(scores)", other))).double()
        found = derive(layer, arguments(LLAMA, tokens=13, dtype=torch.float64), {})
        assert found.proof is None or found.layout.attn is None, found.proof


def test_the_log_sum_exp_is_of_the_same_logits() -> None:
    """A proof by numbers would show it, too; the reason is to be this one."""
    other = SCALED.replace("torch.logsumexp(scores, dim=-1)", "torch.logsumexp(2 * scores, dim=-1)")
    found = derive(made(other), arguments(SCALED), {})
    assert found.layout.attn is None if found.proof is not None else True
    assert "the log-sum-exp of other logits" in found.why, found.why


@pytest.mark.parametrize(("source", "old", "new"), LOOK_ALIKE, ids=[new for *_, new in LOOK_ALIKE])
def test_what_only_looks_like_sinks_leaves_the_other_half(source: str, old: str, new: str) -> None:
    assert source.count(old) == 1
    layer = made(in_double(source.replace(old, new))).double()
    found = derive(layer, arguments(source, tokens=13, dtype=torch.float64), {})
    assert found.proof is not None and found.layout.attn is None and found.layout.ffn is not None, found.why
    assert check(layer, arguments(source, tokens=13, dtype=torch.float64))


def test_what_a_layer_makes_of_its_arguments_is_derived() -> None:
    """Rows of heads that are normed, tables and masks that are computed, a window, a sum in place, weights beside."""
    layer = made(WIDE).double()
    found = derive(layer, arguments(WIDE, tokens=13, dtype=torch.float64), {})
    assert found.proof is not None, found.why
    words = "attn.qk_place=row attn.rope=interleaved attn.mask=add attn.causal=1 attn.post=rmsnorm"
    assert set(words.split()) <= set(found.proof.text.split()), found.proof.text
    assert found.layout.window == 9 and found.here.recipes
    assert check(layer, arguments(WIDE, tokens=13, dtype=torch.float64))


def test_what_depends_on_the_length_is_not_derived() -> None:
    """It computes the same at the lengths of the proof."""
    old, new = "return x + 0.5 * self.drop(f)", "return x + 0.5 * self.drop(f) if T_OF(x) < 10 else x"
    layer = made(T_OF + LLAMA.replace(old, new))
    assert derive(layer, arguments(LLAMA, tokens=9), {}).proof is not None
    found = derive(layer, arguments(LLAMA, tokens=13), {})
    assert found.proof is None and "at another shape" in found.why


def test_a_gradient_that_differs_is_not_derived() -> None:
    """Its result is right."""
    layer = made(LLAMA.replace("* torch.rsqrt(wide", "* torch.rsqrt(wide.detach()"))
    found = derive(layer, arguments(LLAMA), {})
    assert found.proof is None
    turned = made(LLAMA.replace("f = self.w2(h)", "f = TURNED.apply(self.w2(h))"))
    type(turned).forward.__globals__["TURNED"] = _Turned
    found = derive(turned, arguments(LLAMA), {})
    assert found.proof is None and "differs by" in found.why


class _Turned(torch.autograd.Function):
    """The identity, whose gradient is turned round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -gradient


def test_a_copy_has_neither_hooks_nor_a_forward_of_its_own() -> None:
    layer = made(GPT)
    layer.ln_1.register_forward_hook(lambda *_: None)  # type: ignore[union-attr, operator]
    layer.forward = lambda x: x  # type: ignore[method-assign, assignment]
    found: Any = layer_copy(layer, lambda t, _: t.clone())
    assert not found.ln_1._forward_hooks and "forward" not in vars(found)
    assert layer.ln_1._forward_hooks and "forward" in vars(layer)  # type: ignore[union-attr]
