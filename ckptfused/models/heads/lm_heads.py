"""Language models whose loss is made without their logits: an adapter for each kind of model."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from ckptfused.compat.transformers import pretrained_model
from ckptfused.layer.hooks import watched
from ckptfused.layer.parts import Reason
from ckptfused.layer.peft import active_copy
from ckptfused.layer.source import as_read, class_name, function_as_read

_MODELS = "transformers.models"


class LanguageModel:
    """Classes whose forward is a body, a head, and the loss of each next token."""

    classes: tuple[str, ...] = tuple(
        f"{_MODELS}.{name}"
        for name in (
            "gemma.modeling_gemma.GemmaForCausalLM",
            "gpt_neox.modeling_gpt_neox.GPTNeoXForCausalLM",
            "llama.modeling_llama.LlamaForCausalLM",
            "mistral.modeling_mistral.MistralForCausalLM",
            "phi3.modeling_phi3.Phi3ForCausalLM",
            "qwen2.modeling_qwen2.Qwen2ForCausalLM",
            "qwen3.modeling_qwen3.Qwen3ForCausalLM",
        )
    )
    output = "CausalLMOutputWithPast"

    def body(self, model: Any) -> nn.Module:
        """The module between a call's arguments and the hidden states."""
        return getattr(model, model.base_model_prefix)

    def head(self, model: Any) -> nn.Module:
        """The projection to the logits."""
        return model.get_output_embeddings()

    def final_norm(self, model: Any) -> nn.Module | None:
        """The module that makes the hidden states from the last layer's result, as far as it is a norm alone."""
        body = self.body(model)
        return next(filter(None, (getattr(body, name, None) for name in ("norm", "ln_f", "final_layer_norm"))), None)

    def refusal(self, model: Any) -> Reason | None:
        """Why a model is none of those that were read, beside what its projection says."""
        return None if function_as_read(model.loss_function) else Reason("it has a loss function of its own")

    def call_body(self, model: Any, given: dict[str, Any]) -> Any:
        """The body's outputs for a call's arguments without `labels` and `logits_to_keep`."""
        return self.body(model)(**given, return_dict=True)

    def transform(self, model: Any, hidden: Tensor) -> Tensor:
        """What comes between the body and the projection."""
        return hidden

    def options(self, model: Any, labels: Tensor, given: dict[str, Any]) -> dict[str, Any]:
        """Target and options of `linear_cross_entropy`, as the model's loss function reads a call's arguments."""
        target, items = given.get("shift_labels"), given.get("num_items_in_batch")
        return {
            "target": labels if target is None else target,
            "shift": target is None,
            "ignore_index": given.get("ignore_index", -100),
            "num_items": items.to(labels.device) if isinstance(items, Tensor) else items,
        }

    def more(self, model: Any, outputs: Any, loss: Tensor, given: dict[str, Any]) -> dict[str, Any]:
        """What else the model's outputs hold than those of its body; `loss` where something is added to it."""
        return {"loss": loss}


class GemmaLanguageModel(LanguageModel):
    """Gemma 2 and 3, which hold logits below a cap."""

    classes = tuple(f"{_MODELS}.gemma{n}.modeling_gemma{n}.Gemma{n}ForCausalLM" for n in (2, 3))

    def options(self, model: Any, labels: Tensor, given: dict[str, Any]) -> dict[str, Any]:
        return super().options(model, labels, given) | {"softcap": model.config.final_logit_softcapping}


class GPT2LanguageModel(LanguageModel):
    """Its body passes on what cross-attention found."""

    classes = (f"{_MODELS}.gpt2.modeling_gpt2.GPT2LMHeadModel",)
    output = "CausalLMOutputWithCrossAttentions"


class OPTLanguageModel(LanguageModel):
    """Its forward calls the decoder inside its body."""

    classes = (f"{_MODELS}.opt.modeling_opt.OPTForCausalLM",)

    def body(self, model: Any) -> nn.Module:
        return model.model.decoder


class Mixture(LanguageModel):
    """Mixtures of experts, whose routers may have a loss of their own."""

    classes = (
        f"{_MODELS}.mixtral.modeling_mixtral.MixtralForCausalLM",
        f"{_MODELS}.qwen3_moe.modeling_qwen3_moe.Qwen3MoeForCausalLM",
    )
    output = "MoeCausalLMOutputWithPast"

    def call_body(self, model: Any, given: dict[str, Any]) -> Any:
        if given.get("output_router_logits") is None:
            given["output_router_logits"] = model.config.output_router_logits
        return super().call_body(model, given)

    def more(self, model: Any, outputs: Any, loss: Tensor, given: dict[str, Any]) -> dict[str, Any]:
        if not given["output_router_logits"]:
            return {"loss": loss}
        balancing = inspect.unwrap(type(model).forward).__globals__["load_balancing_loss_func"]
        aux = balancing(
            outputs.router_logits, model.num_experts, model.num_experts_per_tok, given.get("attention_mask")
        )
        return {"loss": loss + model.router_aux_loss_coef * aux.to(loss.device), "aux_loss": aux}


class MaskedLanguageModel(LanguageModel):
    """BERT: a token's target is its own label, and a dense layer comes before the projection."""

    classes = (f"{_MODELS}.bert.modeling_bert.BertForMaskedLM",)
    output = "MaskedLMOutput"

    def inside(self, model: Any) -> tuple[nn.Module, ...]:
        """The modules around the projection, whose forwards are replaced."""
        return (model.cls, model.cls.predictions)

    def transform(self, model: Any, hidden: Tensor) -> Tensor:
        return model.cls.predictions.transform(hidden)

    def refusal(self, model: Any) -> Reason | None:
        for module in self.inside(model):
            if (why := watched(module)) is not None:
                return why
            if not as_read(module):
                return Reason(f"the code of {type(module).__name__} is not the one that was read")
        return None

    def options(self, model: Any, labels: Tensor, given: dict[str, Any]) -> dict[str, Any]:
        return {"target": labels}


class Roberta(MaskedLanguageModel):
    """RoBERTa's head: BERT's, with the dense layer's pieces in the head itself."""

    classes = (f"{_MODELS}.roberta.modeling_roberta.RobertaForMaskedLM",)

    def inside(self, model: Any) -> tuple[nn.Module, ...]:
        return (model.lm_head,)

    def transform(self, model: Any, hidden: Tensor) -> Tensor:
        head = model.lm_head
        return head.layer_norm(nn.functional.gelu(head.dense(hidden)))


HEADS = {
    name: adapter
    for adapter in (
        LanguageModel(),
        GemmaLanguageModel(),
        GPT2LanguageModel(),
        OPTLanguageModel(),
        Mixture(),
        MaskedLanguageModel(),
        Roberta(),
    )
    for name in adapter.classes
}


def head_of(model: nn.Module) -> LanguageModel | None:
    """The adapter that reads this class of model, None if there is none."""
    return HEADS.get(class_name(type(model)))


def models(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost models with a head that gives logits, and their names: known classes, and Hugging Face's own."""
    base = pretrained_model()
    found: list[str] = []
    for name, module in model.named_modules():
        theirs = base is not None and isinstance(module, base)
        if theirs and module.get_output_embeddings() is not None and not any(map(name.startswith, found)):
            found.append(name)
            yield name, module


def final_norms(found: Iterable[tuple[str, nn.Module]]) -> list[nn.Module]:
    """The norms before the heads of such models."""
    norms = [family.final_norm(model) for _, model in found if (family := head_of(model)) is not None]
    return [active_copy(norm) for norm in norms if norm is not None]
