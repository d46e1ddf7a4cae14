"""Each private name of another library does, in the version at hand, what ckptfused/compat says of it."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint, noop_context_fn

from ckptfused.compat import (
    pytree,
    torch_autograd,
    torch_compile,
    torch_dispatch,
    torch_distributed,
    torch_memory,
    torch_modules,
)
from tests.forks import python

COMPAT = Path(torch_memory.__file__).parent
# These have tests of their own: what they do is more than to give a name.
MECHANISMS = {"__init__", "kernels", "patches", "versions"}


def test_every_name_has_its_test() -> None:
    """A function or constant of compat is named below."""
    source = Path(__file__).read_text()
    for path in COMPAT.glob("*.py"):
        if path.stem not in MECHANISMS:
            module = importlib.import_module(f"ckptfused.compat.{path.stem}")
            assert [name for name in public(module) if f".{name}" not in source] == [], path.stem


def public(module: ModuleType) -> list[str]:
    """What a module of compat defines or hands on; its modules and types for annotations aside."""
    kinds = ("collections.abc", "typing", "contextlib", "itertools", "__future__")
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
        and name not in ("Tensor", "TorchDispatchMode", "annotations")
        if getattr(value, "__module__", "") not in kinds
    ]


def test_saved_tensor_hooks() -> None:
    auto = torch_autograd
    hooks: auto.SavedTensorHooks = (lambda t: t, lambda t: t)
    assert auto.saved_tensor_hooks() is None and auto.saved_tensor_hooks_allowed()
    auto.push_saved_tensor_hooks(*hooks)
    assert auto.saved_tensor_hooks() == hooks
    auto.pop_saved_tensor_hooks()
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        assert auto.saved_tensor_hooks() == hooks
    assert auto.saved_tensor_hooks() is None
    allowed: list[bool] = []
    torch.func.grad(lambda x: (allowed.append(auto.saved_tensor_hooks_allowed()), x.sin())[1])(torch.ones(()))
    assert allowed == [False]


def test_checkpoints() -> None:
    auto, calls, nodes = torch_autograd, list[int](), list[str]()

    def function(x: Tensor) -> Tensor:
        calls.append(auto.graph_task())
        nodes.append(auto.working_node())
        return x.sin().exp()

    x = torch.ones(2, requires_grad=True)
    checkpoint(function, x, use_reentrant=False).sum().backward()
    assert calls[0] == -1 and calls[1] >= 0  # no backward is at work in a forward
    assert nodes[0] == "" and nodes[1].endswith("Backward0")
    assert auto.vmap_saves_inputs() == (torch.__version__ < "2.12")
    opened = auto.open_checkpoint(function, True, (noop_context_fn, "default", False, True), x)
    next(opened)
    assert auto.saved_tensor_hooks() is not None
    y = function(x)
    assert next(opened, None) is None and auto.saved_tensor_hooks() is None
    y.sum().backward()
    assert len(calls) == 4
    assert hasattr(torch.utils.checkpoint, auto.CHECKPOINT_GENERATOR)


def test_a_checkpoint_that_raises_leaves_no_hooks() -> None:
    options = {"use_reentrant": False, "preserve_rng_state": True, "determinism_check": "default"}

    def fail(x: Tensor) -> Tensor:
        raise ValueError("asked")

    with pytest.raises(ValueError, match="asked") as raised:
        torch_autograd.checkpoint_of_torch(fail, torch.ones(2), **options, debug=False, early_stop=True)
    assert torch_autograd.saved_tensor_hooks() is None and raised.traceback


def test_autograds_books() -> None:
    auto, x = torch_autograd, torch.ones(2, requires_grad=True)
    with torch.no_grad(), auto.unversioned(x):
        x.add_(1)
    assert x._version == 0
    assert auto.tensor_hooks(x) is None and not auto.parameter_hooks(x)
    x.register_hook(lambda grad: grad)
    x.register_post_accumulate_grad_hook(lambda t: None)
    assert len(auto.tensor_hooks(x) or ()) == len(auto.parameter_hooks(x) or ()) == 1
    assert len(auto.gradient_hooks(x)) == 2
    node: Any = get_gradient_edge(x).node
    node.register_hook(lambda gi, go: None)
    node.register_prehook(lambda go: None)
    assert len(auto.gradient_hooks(x)) == 4
    del node
    assert len(auto.gradient_hooks(x)) == 2
    auto.set_tensor_hooks(x, None)
    assert auto.tensor_hooks(x) is None
    assert not auto.is_profiled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert auto.is_profiled()


def test_modes_and_transforms() -> None:
    made, seen = torch_dispatch, list[Any]()

    class Mode(made.DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **kwargs or {})

    assert not made.in_dispatch_mode() and not made.dispatch_modes()
    with Mode() as mode:
        assert made.in_dispatch_mode() and list(made.dispatch_modes()) == [mode]
        with made.without_dispatch_modes():
            torch.ones(1)
        with made.without_modes_and_transforms():
            torch.ones(1)
        assert seen == []
        torch.ones(1)
        assert len(seen) == 1
    assert made.function_modes() == []
    with torch.device("meta"):
        assert len(made.function_modes()) == 1
    assert not made.in_transform()
    found: list[tuple[bool, bool]] = []
    torch.func.grad(lambda x: (found.append((made.in_transform(), made.is_transformed(x))), x.sin())[1])(torch.ones(()))
    assert found == [(True, True)] and not made.is_transformed(torch.ones(()))
    assert made.is_traceable_wrapper_subclass(torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged))


def test_who_adds() -> None:
    """A hook of a backward adds by Python's code, autograd by its own."""
    found: list[bool] = []

    class Mode(torch_dispatch.DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket is torch.ops.aten.add:
                found.append(torch_dispatch.called_by_autograd())
            return func(*args, **kwargs or {})

    x = torch.ones(2, requires_grad=True)
    y = x.sin()
    y.register_hook(lambda g: g * 2 + g)
    z = (y.exp() * y.cos()).sum()
    with Mode(), Mode():
        z.backward()
    assert sorted(found) == [False, False, True, True]  # each is seen by both modes


def test_dispatch() -> None:
    made, aten = torch_dispatch, torch.ops.aten
    assert made.has_kernel("aten::sin", "CPU") and not made.has_kernel("aten::sin", "AutocastCPU")
    assert "aten::mm" in made.operations()
    assert made.schema_of(aten.add_.Tensor).is_mutable
    x = torch.ones(2, requires_grad=True)
    found = made.tensors_of((x, [1, (x.data, None)]), {"out": x.grad, "other": [x]}, x.max(0))
    assert [t.shape for t in found] == [(2,), (2,), (2,), (), ()] and found[0] is found[2] is x
    out = torch.ones(2)
    assert next(made.written_arguments(aten.sin.out, (x,), {"out": out})) is out
    with made.below_autograd():
        assert aten.sin.default(x).grad_fn is None
        assert torch.equal(aten.sin.default.redispatch(made.cpu_keys(), x), x.sin().detach())
    with FakeTensorMode():
        assert isinstance(torch.ones(2), made.FakeTensor)


def test_batches_of_gradients() -> None:
    found: list[tuple[bool, bool, Tensor]] = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            batch = torch_dispatch.LegacyBatch()
            opened = batch.opened(dy)
            found.append((batch.holds(dy), batch.holds(opened), opened))
            return batch.closed(opened * 2)

    x = torch.ones(3, requires_grad=True)
    (grads,) = torch.autograd.grad(Twice.apply(x), x, torch.eye(3), is_grads_batched=True)
    assert torch.equal(grads, 2 * torch.eye(3))
    assert found[0][:2] == (True, False) and found[0][2].shape == (3, 3)


def test_memory() -> None:
    t = torch.ones(4)
    assert torch_memory.storage_id(t) == torch_memory.storage_id(t[1:]) == torch_memory.storage_id(t.untyped_storage())
    assert torch_memory.storage_id(t) != torch_memory.storage_id(torch.ones(4))
    assert torch_memory.is_cow(torch_memory.copy_on_write(t)) and not torch_memory.is_cow(torch.ones(1))
    there = t.data_ptr()
    lent = torch_memory.copy_on_write(t)[1:]
    assert torch_memory.storage_address(lent) == there and torch_memory.is_cow(lent)
    weak = torch_memory.StorageWeakRef(torch.ones(1).untyped_storage())
    assert torch_memory.storage_behind(weak) is None
    assert torch_memory.storage_behind(torch_memory.StorageWeakRef(t.untyped_storage())).nbytes() == t.nbytes
    assert torch_memory.is_view(t[1:]) and not torch_memory.is_view(t)
    assert torch_memory.local_tensor(t) is t
    places, entries = torch_memory.sparse_parts(torch.eye(3).to_sparse())
    assert places.tolist() == [[0, 1, 2]] * 2 and entries.tolist() == [1.0] * 3
    assert torch_memory.sparse_bytes(torch.eye(3).to_sparse()) == 3 * 4 + 2 * 3 * 8
    assert isinstance(torch_memory.cpu_has_amx(), bool)


def test_allocations_of_one_thread() -> None:
    result, sizes = torch_memory.allocations(lambda: torch.empty(1 << 16))
    assert sizes == [result.nbytes]
    _, sizes = torch_memory.allocations(lambda: torch.empty(1 << 16).numel())
    assert sizes == [4 << 16, -(4 << 16)]


@pytest.mark.gpu
def test_an_allocators_history() -> None:
    device = torch.device("cuda", 0)
    torch_memory.record_allocations(True)
    held = torch.empty(1 << 20, device=device)
    found = torch_memory.recorded_allocations(device)
    torch_memory.record_allocations(False)
    assert any(event["action"] == "alloc" and event["size"] >= held.nbytes for event in found)


def test_modules() -> None:
    made, module = torch_modules, nn.Linear(2, 2)
    for dtype, eps in made.DEFAULT_EPS.items():
        x = torch.full((2, 8), 3e-4, dtype=dtype)
        torch.testing.assert_close(nn.functional.rms_norm(x, (8,)), nn.functional.rms_norm(x, (8,), eps=eps))
    assert list(made.global_hooks()) == [] and not made.forward_hooks(module) and not made.forward_pre_hooks(module)
    with nn.modules.module.register_module_forward_hook(lambda *_: None):
        assert len(list(made.global_hooks())) == 1
    handle = module.register_forward_hook(lambda *_: None)
    made.call_always(module, handle.id)
    assert handle.id in module._forward_hooks_always_called
    module.register_forward_pre_hook(lambda *_: None)
    assert len(made.forward_hooks(module)) == len(made.forward_pre_hooks(module)) == 1
    assert not made.has_backward_hooks(module)
    module.register_full_backward_hook(lambda *_: None)
    assert made.has_backward_hooks(module)
    assert isinstance(nn.BatchNorm2d(1), made.BatchNorm) and isinstance(nn.Conv1d(1, 1, 1), made.Convolution)
    assert isinstance(nn.Dropout2d(), made.DropoutBase)
    assert not made.has_hooks(nn.Linear(2, 2))
    kinds = ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook")
    for register in (*kinds, "register_full_backward_pre_hook"):
        hooked = nn.Linear(2, 2)
        getattr(hooked, register)(lambda *_: None)
        assert made.has_hooks(hooked), register
    assert made.OWN_SDPA is nn.functional.scaled_dot_product_attention
    assert made.replaced_function() is None and None not in made._OWN_FUNCTIONS.values()
    assert callable(getattr(module, made.REPLICATE)) and not made.is_packed(module)
    assert made.projects_alike(nn.MultiheadAttention(4, 2)) and not made.projects_alike(
        nn.MultiheadAttention(4, 2, kdim=2)
    )
    assert all(hasattr(nn.TransformerEncoderLayer, name) for name in made.ENCODER_HALVES)
    assert all(hasattr(nn.TransformerDecoderLayer, name) for name in made.DECODER_PARTS)
    attention, q = nn.MultiheadAttention(4, 2), torch.randn(3, 1, 4)
    seen: list[Any] = []

    class Seeing(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            if func in made.OPENED:
                with self:
                    return made.OPENED[func](*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))

    with Seeing():
        y = attention(q, q, q, need_weights=False)[0]
    assert torch.equal(y, attention(q, q, q, need_weights=False)[0])
    assert {*made.OPENED, nn.functional.linear, nn.functional.scaled_dot_product_attention} <= set(seen)
    x, layer = torch.randn(1, 3, 4), nn.TransformerDecoderLayer(4, 2, 8, 0.0, batch_first=True)
    assert made.cross_attention(layer, x, x, None, None, False).shape == x.shape


def test_compiled_modules() -> None:
    code = """
        import torch
        from ckptfused.compat import torch_compile, torch_modules
        assert torch_compile.is_loaded() is False
        module = torch.nn.Linear(1, 1)
        assert torch_compile.partitioner_budget() == 1 and torch_modules.is_compiled(module) is False
        assert torch_modules.COMPILED_MODULE in dir(torch.compile(module, backend="eager"))
        module.compile(backend="eager")
        assert torch_modules.is_compiled(module) and getattr(module, torch_modules.COMPILED_CALL) is not None
        torch_compile.load_dynamo()
        assert torch_compile.is_loaded()
        import torch._functorch.config as config
        config.activation_memory_budget = 0.5
        assert torch_compile.partitioner_budget() == 0.5
    """
    run = python(code)
    assert run.returncode == 0, run.stderr


def test_calls_of_what_is_compiled_are_told_of() -> None:
    calls: list[int] = []
    double = torch.compile(lambda x: x * 2, backend="eager")
    with torch_compile.told_of_calls(lambda: calls.append(0)):
        assert torch.equal(double(torch.ones(2)), torch.full((2,), 2.0))
        torch.compiler.disable(lambda: None)()
    double(torch.ones(2))
    assert calls == [0]


def test_functions_marked_for_dynamo() -> None:
    made: list[int] = []

    @torch_compile.constant_result
    def fresh() -> int:
        made.append(0)
        return len(made)

    @torch_compile.in_graph
    def kept(x: Tensor) -> Tensor:
        return x.sin().exp()

    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x: kept(x) * fresh(), backend=backend, fullgraph=True)
    x = torch.ones(2)
    assert torch.equal(compiled(x), compiled(x)) and made == [0]
    called = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert len(called) == 2 and torch.sin not in called  # the function as it is, and the product


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin:UserWarning")
def test_what_keeps_dynamo_out() -> None:
    def function() -> None: ...

    disabled: Any = torch.compiler.disable(function)
    around = functools.wraps(disabled)(lambda: disabled())
    assert torch_compile.not_disabled(disabled) is function
    assert torch_compile.not_disabled(function) is function and torch_compile.not_disabled(around) is around
    assert torch_compile.dynamo_at_work() is None
    found: list[Any] = []

    def breaks_the_graph(x: Tensor) -> Tensor:
        found.append(torch_compile.dynamo_at_work())
        return x.sin()

    torch.compile(breaks_the_graph, backend="eager")(torch.ones(2))
    assert found[0] is not None and torch_compile.dynamo_at_work() is None


def test_optimizers() -> None:
    """A GradScaler has an optimizer step that has no gradients; clipping by norm goes through what is put there."""
    weight = nn.Parameter(torch.ones(2))
    optimizer, stepped = torch.optim.SGD([weight], fused=True), []
    assert torch_autograd.accept_scales(optimizer, False) is True
    optimizer.register_step_post_hook(lambda *_: stepped.append(vars(optimizer)["found_inf"]))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.step(optimizer)
    assert torch_autograd.accept_scales(optimizer, True) is False
    scaler.step(optimizer)
    assert len(stepped) == 1
    weight.grad = torch.ones(2)
    with torch_autograd.clipped_by(lambda clip: lambda parameters, *args: stepped.extend(parameters)):
        torch.nn.utils.clip_grad_norm_([weight], 0.5)
    assert stepped[1] is weight and torch.equal(weight.grad, torch.ones(2))
    torch.nn.utils.clip_grad_norm_([weight], 0.5)
    assert weight.grad.norm() <= 0.5


def test_trees() -> None:
    tree = {"a": [1, (2, 3)]}
    leaves, spec = pytree.tree_flatten(tree)
    assert leaves == pytree.tree_leaves(tree) == [1, 2, 3] and isinstance(spec, pytree.TreeSpec)
    assert pytree.tree_unflatten(leaves, spec) == tree and pytree.tree_map(lambda n: n, tree) == tree
    assert pytree.broadcast_to_and_flatten({"a": 0}, spec) == [0, 0, 0]
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(tree)[0]]
    assert paths[0] == "['a'][0]" and list in pytree.SUPPORTED_NODES


def test_distributed() -> None:
    from torch.distributed import fsdp
    from torch.distributed._composable import checkpoint_activation
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper

    made, module = torch_distributed, nn.Linear(1, 1)
    assert made.fsdp1() is fsdp.FullyShardedDataParallel and made.fsdp2() is fsdp.FSDPModule
    assert not made.is_managed(vars(module)) and not made.is_flat_view(module.weight)
    assert not made.is_partitioned(module.weight)
    assert made.checkpoint_wrappers().CheckpointWrapper is CheckpointWrapper
    wrapped = checkpoint_wrapper(module)
    assert getattr(wrapped, made.WRAPPED) is module
    assert made.WRAPPED in made.WRAPPER_NAMES and checkpoint_activation.__name__ == made.COMPOSABLE_CHECKPOINT
    assert hasattr(checkpoint_activation, torch_autograd.CHECKPOINT_GENERATOR)
    assert not made.has_composable_checkpoint(module)
    checkpoint_activation.checkpoint(module)
    assert made.has_composable_checkpoint(module)
    assert {*made.composable_names()} <= vars(module).keys()
    sharded = type("FSDPLinear", (fsdp.FSDPModule, nn.Linear), {})  # as `fully_shard` makes it
    assert made.own_class(sharded) is made.own_class(nn.Linear) is nn.Linear
    # What FSDP1 sets in several processes, and tests/models/distributed_runs.py meets there.
    for place, name in (("_dynamo_utils", "_is_fsdp_managed_module"), ("_flat_param", "_is_flat_param")):
        assert name in inspect.getsource(importlib.import_module(f"torch.distributed.fsdp.{place}"))


def test_transformers() -> None:
    pytest.importorskip("transformers")
    import transformers as hf
    from transformers.modeling_layers import GradientCheckpointingLayer

    from ckptfused.compat import transformers as made

    config = hf.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    model = hf.LlamaForCausalLM(config)
    layer = model.model.layers[0]
    assert made.checkpointing_layer() is GradientCheckpointingLayer and made.is_checkpointing_layer(layer)
    assert not made.is_checkpointing_layer(model) and made.checkpoint_of(layer) is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of its new name
        model.gradient_checkpointing_enable()
    assert callable(made.checkpoint_of(layer)) and isinstance(made.checkpoints_with_cache(layer), bool)
    in_call, beneath = "__call__" in vars(made.checkpointing_layer()), made.beneath_checkpoint(type(layer))
    assert beneath is None if in_call else [*inspect.signature(beneath).parameters][:2] == ["self", "hidden_states"]
    assert made.beneath_checkpoint(nn.Linear) is None
    assert made.attention_implementation(model.config) == "sdpa" and made.attention_function("eager") is None
    assert callable(made.attention_function("sdpa"))
    assert made.pretrained_model() is hf.PreTrainedModel and made.knows(hf.AutoModelForCausalLM, config)
    assert not made.knows(hf.AutoModelForCausalLM, hf.ViTConfig())
    assert made.output_class("CausalLMOutputWithPast") is type(model(torch.zeros(1, 2, dtype=torch.long)))
    made.attention_function("flash_attention_2")  # which imports it
    flash = made.flash_module()
    assert callable(getattr(flash, made.FLASH_CALL)) and callable(getattr(flash, made.FLASH_TYPE))
    sharing = made.key_sharing()
    assert sharing is None or sharing({"a": 1})["a"] == 1
    place = made.packing_lookup()
    assert place is not None and callable(getattr(*place))
    module, _, name = made.CONV1D.rpartition(".")
    assert issubclass(getattr(importlib.import_module(module), name), nn.Module)
    collector = made.output_collector()
    if collector is not None:
        model(torch.zeros(1, 2, dtype=torch.long), output_attentions=True, output_hidden_states=True)
        hooks = [hook for m in model.modules() for hook in torch_modules.forward_hooks(m).values()]
        assert any(map(made.collects, hooks)) and collector.get() is None
    assert not made.collects(print)


def test_experts_of_transformers() -> None:
    pytest.importorskip("transformers.integrations.moe")
    from transformers.models.mixtral import MixtralConfig, modeling_mixtral

    from ckptfused.compat import transformers as made

    config = MixtralConfig(hidden_size=8, intermediate_size=8, num_local_experts=2)
    experts = modeling_mixtral.MixtralExperts(config)
    functions = made.experts_functions()
    if made.is_expert_parallel(experts) is None:  # before classes said so, they are left alone
        return
    own = made.own_experts_forward(type(experts))
    assert functions.get_interface("eager", own) is own and callable(functions.get_interface("grouped_mm", own))
    assert made.experts_implementation(config) in (None, "eager", "grouped_mm", "batched_mm")
    assert made.is_expert_parallel(experts) is False and made.is_expert_parallel(nn.Linear(1, 1)) is None
    gate = torch.randn(3, 16)
    assert torch.equal(made.gate_of(experts)(gate), nn.functional.silu(gate[:, :8]) * gate[:, 8:])


def test_peft() -> None:
    pytest.importorskip("peft")
    from peft import LoraConfig, get_peft_model

    from ckptfused.compat import peft as made

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    model = get_peft_model(Model(), LoraConfig(target_modules=["a"], modules_to_save=["b"]))
    kinds = {f"{type(m).__module__}.{type(m).__name__}": m for m in model.modules()}
    assert {made.LORA_LINEARS[0], made.MODULES_TO_SAVE} <= kinds.keys()
    from peft.tuners.lora.layer import ParamWrapper

    assert f"{ParamWrapper.__module__}.{ParamWrapper.__name__}" == made.PARAM_WRAPPER
    assert "default" in made.adapter_names(kinds[made.MODULES_TO_SAVE])


def test_accelerate() -> None:
    pytest.importorskip("accelerate")
    from accelerate import hooks

    from ckptfused.compat import accelerate as made

    module = hooks.add_hook_to_module(nn.Linear(1, 1), hooks.ModelHook())
    assert hasattr(module, made.BELOW_HOOKS)
    assert made.BELOW_AUTOCAST in inspect.getsource(importlib.import_module("accelerate.accelerator"))
    importlib.import_module("accelerate").PartialState(cpu=True)
    importlib.import_module("accelerate").Accelerator(cpu=True)
    assert not made.by_ddp()  # one process


def test_bitsandbytes() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    from ckptfused.compat import quantizers as made

    layer = bnb.nn.Linear4bit(64, 64, quant_type="nf4")
    assert f"{type(layer).__module__}.{type(layer).__name__}" == made.LINEAR_4BIT and made.four_bit_state(layer) is None
    assert made.four_bit_compute_type(layer, torch.bfloat16, (torch.bfloat16,)) is torch.bfloat16
    state = made.four_bit_state(layer.to("cpu"))
    assert state.quant_type == "nf4" and not made.repacked(state)
    assert layer.support_avx512bf16_for_cpu in (0, 1) and made.four_bit_layers(nn.Sequential(layer)) == [layer]
    layer.support_avx512bf16_for_cpu = True  # as on a processor that has it
    made.never_pack(nn.Sequential(layer.eval()))
    with torch.no_grad():
        assert layer(torch.ones(2, 64)).isfinite().all() and not made.repacked(layer.weight.quant_state)
    x = torch.ones(2, 64, requires_grad=True)
    layer.quant_state.packing_format_for_cpu = True
    made.refuse_gradients_of_packed(nn.Sequential(layer))
    with pytest.raises(RuntimeError, match=re.escape(made.PACKED)):
        layer(x)
    layer.quant_state.packing_format_for_cpu = False
    made.as_bitsandbytes_does(nn.Sequential(layer))
    assert layer.support_avx512bf16_for_cpu is True and layer(x).requires_grad
    layer.weight.quant_state = None  # as FSDP leaves it
    assert made.four_bit_state(layer) is state
    layer = bnb.nn.Linear4bit(64, 64, compute_dtype=torch.float16)
    assert made.four_bit_compute_type(layer, torch.bfloat16, (torch.bfloat16,)) is torch.float16
    layer = bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False).to("cpu")
    assert f"{type(layer).__module__}.{type(layer).__name__}" == made.LINEAR_8BIT
    codes, scales = made.row_scales(layer)
    assert codes.dtype == torch.int8 and scales.shape == (64,)
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=32))
    made.load_in_4bit(model, torch.bfloat16)
    down = model.model.layers[0].mlp.down_proj
    state = made.four_bit_state(down)
    assert down.weight.shape == (64 * 96 // 2, 1) and (state.shape, state.quant_type) == ((64, 96), "nf4")
    assert type(model.lm_head) is nn.Linear


def test_four_bit_stacks() -> None:
    parametrize = pytest.importorskip("bitsandbytes.nn.parametrize")
    from ckptfused.compat import quantizers as made

    module: Any = nn.Module()
    module.weight = nn.Parameter(torch.randn(2, 4, 64))
    parametrize.replace_parameter_4bit(module, "weight")
    (made_by,) = module.parametrizations["weight"]
    assert f"{type(made_by).__module__}.{type(made_by).__name__}" == made.FOUR_BIT_STACK
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    assert len(hooks) == 2 and all(map(made.changes_nothing, hooks))
    assert not made.changes_nothing(print)
    module._forward_hooks_always_called.clear()  # as in 0.49
    made.end_caches(nn.Sequential(module))
    assert [*module._forward_hooks_always_called] == [*module._forward_hooks]


def test_hqq() -> None:
    core = pytest.importorskip("hqq.core.quantize")
    from ckptfused.compat import quantizers as made

    config = core.BaseQuantizeConfig(nbits=4, group_size=16, axis=0)
    layer = core.HQQLinear(nn.Linear(64, 32), config, compute_dtype=torch.float32, device="cpu")
    assert f"{type(layer).__module__}.{type(layer).__name__}" == made.HQQ_LINEAR
    parts = made.hqq_parts(layer)
    assert isinstance(parts, made.HQQParts) and parts[0] == "uint4" and parts[4:] == (16, True)
    assert all(name in inspect.getsource(type(layer)) for name in made.HQQ_METHODS)
    assert parts.codes is layer.W_q and (parts.scale.numel(), parts.offset.numel()) == (128, 128)
    layer.meta["quant_zero"] = True
    assert made.hqq_parts(layer) is None


@pytest.mark.parametrize("awq", [False, True], ids=["gptq", "awq"])
def test_gptqmodel(awq: bool) -> None:
    """Its layers where it is installed, else stand-ins: it asks for a newer torch than is tested here."""
    from ckptfused.compat import quantizers as made
    from tests.gptqmodel_layers import Way, own_layer, stand_in

    way, names = Way("it", block=8, awq=awq), (made.AWQ_LINEAR,) if awq else made.GPTQ_LINEARS
    installed = importlib.util.find_spec("gptqmodel") is not None
    for name in names:
        layer: Any = own_layer(nn.Linear(32, 64), way, name) if installed else stand_in(nn.Linear(32, 64), way)
        parts = made.gptq_parts(layer.train())
        assert isinstance(parts, made.GPTQParts) and not parts.why and (parts.bits, parts.block) == (4, 8)
        assert parts.codes is layer.qweight and (parts.blocks is None) == awq
        assert (parts.scale.shape, parts.offset.shape) == ((4, 64), (4, 8))
        assert made.runs_own_dequantize(layer)
        methods = made.AWQ_METHODS if awq else made.GPTQ_METHODS
        assert not installed or any(hasattr(layer, method) for method in methods)
        layer.dequantize_weight = lambda: None
        assert not made.runs_own_dequantize(layer)


def test_torchao() -> None:
    api = pytest.importorskip("torchao.quantization")
    from ckptfused.compat import quantizers as made

    held = nn.Sequential(nn.Linear(64, 32), nn.Linear(64, 32))
    weight = held[0].weight.detach().clone()
    api.quantize_(held[:1], api.Int8WeightOnlyConfig())
    assert f"{type(held[0].weight).__module__}.{type(held[0].weight).__name__}" == made.INT8_TENSOR
    int8 = made.int8_parts(held[0].weight)
    assert isinstance(int8, made.Int8Parts) and int8.block == (1, 64) and not int8.quantizes_input
    assert (int8.codes * int8.scale - weight).abs().max() < 2e-3
    nf4_tensor = api.NF4Tensor.from_tensor(weight, 16, 4)
    assert f"{type(nf4_tensor).__module__}.{type(nf4_tensor).__name__}" == made.NF4_TENSOR
    nf4 = made.nf4_parts(nf4_tensor)
    assert isinstance(nf4, made.NF4Parts)
    assert (nf4.codes.numel(), nf4.scale.numel(), nf4.nested_scale.numel()) == (1024, 128, 32)
    assert (nf4.table.numel(), nf4.mean.dim(), nf4.block, nf4.nested) == (16, 0, 16, 4)


def test_triton() -> None:
    from ckptfused.compat import triton as made

    try:
        expected = importlib.import_module("triton").__version__
    except ModuleNotFoundError:
        expected = ""
    assert made.triton_version() == expected


def test_timm() -> None:
    layers = pytest.importorskip("timm.layers")
    from ckptfused.compat import timm as made

    assert made.is_fast(layers.LayerNorm(2)) is layers.is_fast_norm() and not made.is_fast(nn.LayerNorm(2))


def test_trl() -> None:
    utils = pytest.importorskip("trl.trainer.utils")
    from ckptfused.compat import trl as made

    assert made.FUSED_HEAD in inspect.getsource(utils.add_fused_lm_head)
    model, batch = nn.Linear(1, 1), {"input_ids": None}
    assert made.as_trained(model, batch) == batch


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_a_function_that_is_not_traced() -> None:
    """Without Dynamo at work it is the function itself."""
    seen: list[Any] = []

    def look() -> None:
        seen.append((torch.compiler.is_compiling(), torch_compile.dynamo_at_work()))

    assert torch_compile.untraced(look) is look

    def breaks_the_graph(x: Tensor) -> Tensor:
        torch_compile.untraced(look)()
        return x.sin()

    torch.compile(breaks_the_graph, backend="eager")(torch.ones(2))
    assert seen == [(False, None)]
