"""Defects to plant, each as one exact replacement, and the test that has to fail then."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.cases import TILED


@dataclass(frozen=True)
class Mutant:
    """One defect: where it is planted (from the root of the repository), and the test that has to fail."""

    id: str
    file: str
    text: str
    defect: str
    test: str
    source: str = ""  # where the file is a header: the source below csrc/ that is compiled again with it

    def plant(self, tree: Path) -> None:
        """Changes the file in a copy of the repository's folders."""
        file = tree / self.file
        before = file.read_text()
        assert before.count(self.text) == 1, f"{self.file} no longer has, exactly once:\n{self.text}"
        file.write_text(before.replace(self.text, self.defect))


def _tiled(tokens: int) -> str:
    case, dtype = next((case, dtype) for case, dtype in TILED if case.tokens == tokens)
    return f"tests/autograd/test_block_oracle.py::test_ffn_tiles[{case.id}-{str(dtype)[6:]}-cpu]"


MUTANTS = (
    Mutant(
        "a segment replayed with the arguments of its first layer",
        file="ckptfused/generic/chain.py",
        text="step = _Step(self, function, module, args, kwargs, around)",
        defect='kept = vars(self).setdefault("kept", kwargs); step = _Step(self, function, module, args, kept, around)',
        test="tests/convert/test_segments.py::test_gradients_are_those_without_segments[gemma3]",
    ),
    Mutant(
        "a segment that goes on with a result changed in place",
        file="ckptfused/generic/chain.py",
        text="t.storage_offset(), t.shape, t.stride(), t.dtype, t._version",
        defect="t.storage_offset(), t.shape, t.stride(), t.dtype",
        test="tests/convert/test_segments.py::test_a_segment_ends_where_the_model_does_something[in place]",
    ),
    Mutant(
        "a replay of a segment that goes on drawing",
        file="ckptfused/generic/chain.py",
        text="        torch.set_rng_state(cpu)\n",
        defect="",
        test="tests/convert/test_segments.py::test_others_draw_between_layers",
    ),
    Mutant(
        "a segment that is held when its graph is gone",
        file="ckptfused/generic/chain.py",
        text="self._unpack = weakref.ref(self._first)",
        defect="self._unpack = (lambda held: lambda: held)(self._first)",
        test="tests/convert/test_segments.py::test_a_replay_holds_one_segment",
    ),
    Mutant(
        "a policy's digest that leaves out the loss's scratch",
        file="ckptfused/convert/policy.py",
        text="json.dumps(self.to_dict(), sort_keys=True)",
        defect='json.dumps({**self.to_dict(), "loss_scratch": None}, sort_keys=True)',
        test="tests/convert/test_policy.py::test_all_differ",
    ),
    Mutant(
        "every k-th layer off by one",
        file="ckptfused/convert/policy.py",
        text='* (check_integer("k", k, 1) - 1)',
        defect='* check_integer("k", k, 1)',
        test="tests/convert/test_policy.py::test_modes",
    ),
    Mutant(
        "one residual dropout decision flipped",
        file="csrc/kernels/cpu/residual.inl",
        text="dropout_apply(row[i], draws[i], threshold, scale);",
        defect="dropout_apply(row[i],"
        " logical_row == 5 && i == 3 ? uint16_t(draws[i] < threshold ? 65535 : 0) : draws[i], threshold, scale);",
        test="tests/autograd/test_block_oracle.py::test_one_flipped_mask_bit_is_noticed",
    ),
    Mutant(
        "replay of the hidden dropout at another site",
        file="csrc/autograd/ffn.cpp",
        text="dgu.gate, dgu.up, f.act, f.p_hidden, int(DropoutSite::ffn_hidden),",
        defect="dgu.gate, dgu.up, f.act, f.p_hidden, int(DropoutSite::ffn_residual),",
        test="tests/autograd/test_block_oracle.py::test_one_flipped_mask_bit_is_noticed",
    ),
    Mutant(
        "last row tile left out of the down weight's gradient",
        file="csrc/autograd/ffn.cpp",
        text="    if (need_h) {\n",
        defect="    if (need_h && (t.row0 == 0 || t.row0 + t.rows < N_)) {\n",
        test=_tiled(450),
    ),
    Mutant(
        "gradient of the kept gate and up written over them",
        file="csrc/autograd/ffn.cpp",
        text=': gate_up(empty({t.rows, f.gated() ? 2 * t.cols : t.cols}, P_, "gu tile"), t);',
        defect=": gate_up(value_.gu, t);",
        test="tests/autograd/test_keep.py::test_second_backward_is_equal[all-cpu]",
    ),
    Mutant(
        "replay of an adapter's dropout at another site",
        file="csrc/autograd/adapters.cpp",
        text="s.site};",
        defect="s.site + (backward_ ? 1 : 0)};",
        test="tests/autograd/test_block_oracle.py::test_one_flipped_mask_bit_is_noticed",
    ),
    Mutant(
        "an adapter's dropout that starts anew in each tile of rows",
        file="csrc/autograd/ffn.cpp",
        text="gu_parts(t), f.transposed, t.row0);",
        defect="gu_parts(t), f.transposed);",
        test=_tiled(700),
    ),
    Mutant(
        "ranges of rows that leave out the last block in the gradient of an adapter",
        file="csrc/ops/adapters_bwd_cpu.cpp",
        text="row < end; row += kRows) {",
        defect="row + (end < n ? kRows : 0) < end; row += kRows) {",
        test=_tiled(700),
    ),
    Mutant(
        "ensure_mid without its replay",
        file="csrc/autograd/block.cpp",
        text="  if (value_.mid.defined()) return;\n  ensure_proj();\n",
        defect="  if (value_.mid.defined()) return;\n  if (backward_) { value_.mid = x_; return; }\n  ensure_proj();\n",
        test="tests/autograd/test_keep.py::test_every_set_of_names[pre-float32-cpu]",
    ),
    Mutant(
        "ensure_qk without RoPE in the replay",
        file="csrc/autograd/attention.cpp",
        text="  if (plain) return;\n",
        defect="  if (plain || backward_) return;\n",
        test="tests/autograd/test_block_oracle.py::test_wide_heads[128-all-float32-cpu]",
    ),
    Mutant(
        "an offloaded input that is used before its copy is done",
        file="ckptfused/offload/saved.py",
        text="            self._copies.wait(self._done, self._home, x)\n",
        defect="",
        test="tests/offload/test_offload.py::test_bits_order_and_memory[fused-late]",
    ),
    Mutant(
        "saved tensors beside an offloaded input whose version nobody looks at",
        file="ckptfused/offload/saved.py",
        text="        _check(_name(self._t), version(self._t), self._version)\n",
        defect="",
        test="tests/offload/test_offload.py::test_what_stays_is_checked_too",
    ),
    Mutant(
        "arguments that are lazily cloned",
        file="ckptfused/generic/copies.py",
        text="copy, guard = _lend(t)",
        defect="copy, guard = torch._lazy_clone(t), t",
        test="tests/generic/test_checkpoint.py::test_arguments_keep_their_memory[itself-no_grad-numpy]",
    ),
    Mutant(
        "generators that a replay draws on from",
        file="ckptfused/generic/draws.py",
        text="            restore(g, found)",
        defect="            pass",
        test="tests/generic/test_state.py::test_generators_among_arguments_draw_the_same_again",
    ),
    Mutant(
        "parameters whose version nobody looks at",
        file="ckptfused/generic/state.py",
        text="if watched.changed()",
        defect="if False",
        test="tests/generic/test_state.py::test_an_optimizer_step_between_forward_and_backward_raises",
    ),
    Mutant(
        "buffers that a replay finds as they are now",
        file="ckptfused/generic/state.py",
        text="with with_old_values(swapped), shown(instead), reads",
        defect="with with_old_values(swapped), reads",
        test="tests/generic/test_state.py::test_state_is_updated_once[mean-in-place-1]",
    ),
    Mutant(
        "buffers of a replay that other threads find, too",
        file="ckptfused/generic/views.py",
        text="elif len(self.views) == 1 and self.views.keys() >= _inside.keys():",
        defect="elif len(self.views) == 1:",
        test="tests/generic/test_state.py::test_a_thread_that_comes_while_another_replays[forward]",
    ),
    Mutant(
        "a replay with the modes and rates of the present",
        file="ckptfused/generic/state.py",
        text="before = [(holder, holder.put(holder.found)) for holder in self._survey.changed_since()]",
        defect="before = []",
        test="tests/generic/test_state.py::test_the_replay_has_the_modes_of_its_forward[rate]",
    ),
    Mutant(
        "containers of a module whose own containers nobody looks into",
        file="ckptfused/generic/survey.py",
        text="self.look_at(inner, depth + 1)",
        defect="pass",
        test="tests/generic/test_survey.py::test_it_is_updated_once[nested-1]",
    ),
    Mutant(
        "submodules that are not looked for again",
        file="ckptfused/generic/reach.py",
        text="and _identities(modules) == children:",
        defect=":",
        test="tests/generic/test_survey.py::test_submodules_are_those_of_now",
    ),
    Mutant(
        "saved tensors that are handed out as they have become",
        file="ckptfused/generic/handed_out.py",
        text="if (now := version(t)) != expected:",
        defect="now = expected\n    if False:",
        test="tests/generic/test_handed_out.py::test_each_backward_raises",
    ),
    Mutant(
        "an extension that is imported as an attribute of its package",
        file="ckptfused/_extension.py",
        text="module = importlib.import_module(name)",
        defect="from ckptfused import _C as module",
        test="tests/repository/test_packaging.py::test_without_an_extension_the_error_says_what_to_do",
    ),
    Mutant(
        "tables and masks on another device than x taken for ones beside it",
        file="ckptfused/checks.py",
        text="        check_plain(name, value)\n        if value.device != x.device:",
        defect='        check_plain(name, value)\n        if value.device.type not in (x.device.type, "meta"):',
        test="tests/modules/test_messages.py::test_another_device",
    ),
    Mutant(
        "a rotary table for each module",
        file="ckptfused/modules/rotary.py",
        text="table = _tables.get(key)",
        defect="table = None",
        test="tests/modules/test_rotary.py::test_blocks_share_it_and_free_it",
    ),
    Mutant(
        "a cache that is looked for with gradients alone",
        file="ckptfused/convert/caches.py",
        text="(layer.training and not _in_use(cache, index))",
        defect="(layer.training and torch.is_grad_enabled() and not _in_use(cache, index))",
        test="tests/convert/test_caches.py::test_a_pass_is_the_same_with_and_without_gradients[llama]",
    ),
    Mutant(
        "keys that a cache takes without their norm",
        file="ckptfused/key_values.py",
        text="    k = norm(k, weight, bias, kind, eps)\n",
        defect="",
        test="tests/convert/test_caches.py::test_what_is_in_the_cache[qwen3]",
    ),
    Mutant(
        "a cache of an unknown kind taken for empty",
        file="ckptfused/convert/caches.py",
        text="or its layers have no length\n        return True",
        defect="or its layers have no length\n        return False",
        test="tests/convert/test_other_caches.py::test_caches_are_found_by_value",
    ),
    Mutant(
        "a block that attends past what stands for attention",
        file="ckptfused/layer/describe.py",
        text="if a is not None and sdpa_replaced():",
        defect="if False:",
        test="tests/modules/test_sdpa.py::test_a_block_calls_it[function]",
    ),
    Mutant(
        "a converted layer that does",
        file="ckptfused/layer/describe.py",
        text="if a is not None and sdpa_replaced():",
        defect="if False:",
        test="tests/convert/test_sdpa.py::test_it_is_called[llama-function]",
    ),
    Mutant(
        "adapters of PEFT's without their scale",
        file="ckptfused/layer/peft.py",
        text="float(scale)",
        defect="1.0",
        test="tests/modules/test_peft.py::test_gradients[False-one]",
    ),
    Mutant(
        "an adapter that PyTorch's attention reads past, without a word",
        file="ckptfused/layer/encoder.py",
        text="if type(attn) is MultiheadAttention and adapted(attn.out_proj):",
        defect="if False:",
        test="tests/modules/test_peft.py::test_a_generic_call_that_would_leave_an_adapter_out",
    ),
    Mutant(
        "a replay of an outer checkpoint that draws anew",
        file="ckptfused/outer_checkpoint.py",
        text="generator = current = (before or current).clone_state()",
        defect="current = before or current",
        test="tests/test_outer_checkpoint.py::test_a_replay_draws_what_the_forward_drew",
    ),
    Mutant(
        "an outer checkpoint around one layer that replays it",
        file="ckptfused/outer_checkpoint.py",
        text="if hooks is None or around is None or not _is_around(around.frame, module):",
        defect="if True:",
        test="tests/test_outer_checkpoint.py::test_a_checkpoint_around_one_module_replays_nothing",
    ),
    Mutant(
        "tensor-parallel weights taken for whole ones",
        file="ckptfused/modules/fused.py",
        text="    refuse_tensor_parallel(module)\n",
        defect="",
        test="tests/modules/test_tensor_parallel.py::test_a_parallel_block",
    ),
    Mutant(
        "layers counted as one whose weights differ in what is trained",
        file="ckptfused/convert/counts.py",
        text="value.device, value.requires_grad",
        defect="value.device",
        test="tests/convert/test_report_kinds.py::test_what_differs_is_counted_apart",
    ),
    Mutant(
        "a segment differentiated once, without a word",
        file="ckptfused/modules/segment.py",
        text="    @staticmethod\n    def backward(ctx: Any, dy: Tensor)",
        defect="    @staticmethod\n    @torch.autograd.function.once_differentiable\n"
        "    def backward(ctx: Any, dy: Tensor)",
        test="tests/test_double_backward.py::test_hessian_of_a_sequential[1]",
    ),
    Mutant(
        "a second derivative of what dy reaches alone",
        file="ckptfused/double_backward.py",
        text="any(t is not None and t.requires_grad for t in (dy, x, *params))",
        defect="dy.requires_grad",
        test="tests/test_double_backward.py::test_of_one_tensor_alone[x-block]",
    ),
    Mutant(
        "batched gradients of which one is taken for all",
        file="ckptfused/double_backward.py",
        text="leaf.select(dim, i)",
        defect="leaf.select(dim, 0)",
        test="tests/autograd/test_transforms.py::test_batched_gradients_have_the_bits_of_single_ones[block]",
    ),
    Mutant(
        "memory that is there in part taken for whole",
        file="csrc/ops/checks.cpp",
        text="there >= needed",
        defect="there > 0",
        test="tests/autograd/test_absent_memory.py::test_backward_refuses_it[pre-x-short-cpu]",
    ),
    Mutant(
        "a backward under the settings of the present",
        file="csrc/autograd/function.cpp",
        text='    const SettingsGuard guard(ctx->saved_data["settings"].toIntVector());\n',
        defect="",
        test="tests/test_settings.py::test_a_change_between_forward_and_backward[four threads, then one-pre-float32]",
    ),
    Mutant(
        "a generic replay under the settings of the present",
        file="ckptfused/generic/checkpoint.py",
        text="            settings.under(self.settings),\n",
        defect="",
        test="tests/test_settings.py::test_generic_replays[four threads, then one]",
    ),
    Mutant(
        "half precision widened through a float32 subnormal",
        file="csrc/math/types.h",
        text="< 0x00800000u ? float_to_bits(subnormal) : normal;",
        defect="< 0x00800000u ? float_to_bits(bits_to_float(magnitude) * bits_to_float(0x77800000u)) : normal;",
        test="tests/kernels/test_subnormals.py::test_a_norm_of_subnormals",
        source="kernels/cpu/norm.cpp",
    ),
    Mutant(
        "the gradient of an FFN's input summed in bfloat16 over its tiles",
        file="csrc/autograd/ffn.cpp",
        text='like_x(cut_cols ? A_ : P_, "d n2")',
        defect='like_x(P_, "d n2")',
        test="tests/autograd/test_tile_sums.py::test_the_input_gradient_is_summed_in_float32[False-relu]",
    ),
    Mutant(
        "a lone task with more threads than one among others",
        file="csrc/ops/tasks_cpu.h",
        text="    const ThreadsGuard serial(1);\n",
        defect="",
        test="tests/autograd/test_tile_sums.py::test_a_lone_task_runs_on_one_thread[lone_adapter-highest]",
        source="ops/adapters_fwd_cpu.cpp",
    ),
    Mutant(
        "calls that all have the seed of the generator",
        file="csrc/ops/rng_cpu.cpp",
        text="source->random64()",
        defect="source->current_seed()",
        test="tests/autograd/test_rng_state.py::test_calls_differ_and_a_seed_reproduces_them[cpu]",
    ),
    Mutant(
        "masks of six rounds of Philox",
        file="csrc/math/dropout.h",
        text="return philox4x32<7>(",
        defect="return philox4x32<6>(",
        test="tests/test_rng.py::test_masks_of_odd_shapes[0.5-shape1-cpu]",
        source="kernels/cpu/dropout.cpp",
    ),
    Mutant(
        "a window of one key more",
        file="csrc/kernels/cpu/attention_rows.h",
        text="rule.keys, rule.causal, rule.window);",
        defect="rule.keys, rule.causal, rule.window > 0 ? rule.window + 1 : 0);",
        test="tests/ops/test_attention.py::test_matches_reference[cpu-window=9]",
        source="kernels/cpu/attention.cpp",
    ),
    Mutant(
        "a soft-cap that backward takes for a constant",
        file="csrc/kernels/cpu/attention.inl",
        text="ds[i] *= slope[i];",
        defect="ds[i] *= A(1);",
        test="tests/ops/test_attention.py::test_matches_reference[cpu-softcap=2.0]",
    ),
    Mutant(
        "padding whose True may be attended to",
        file="ckptfused/masks.py",
        text='_kind("src_key_padding_mask", src_key_padding_mask, "drop")',
        defect='_kind("src_key_padding_mask", src_key_padding_mask, "keep")',
        test="tests/modules/test_transformer_encoder_layer.py::test_masks[False-padding-cpu]",
    ),
    Mutant(
        "masks of single heads that go by heads first",
        file="ckptfused/masks.py",
        text="return src_mask.unflatten(0, (batch, heads))",
        defect="return src_mask.unflatten(0, (heads, batch)).transpose(0, 1)",
        test="tests/modules/test_transformer_encoder_layer.py::test_masks[False-bool-heads-cpu]",
    ),
    Mutant(
        "saved bytes without the random state",
        file="ckptfused/cost/work.py",
        text="rng = RNG_STATE_BYTES if spec.has_dropout else 0",
        defect="rng = 0",
        test="tests/cost/test_cost.py::test_saved_bytes[llama-joint-dropout-float32-cpu-inputs]",
    ),
    Mutant(
        "a compiled program that expects another layout of attention's output",
        file="ckptfused/fake.py",
        text="o = q.new_empty((batch, length, heads, dim)).transpose(1, 2)",
        defect="o = q.new_empty((batch, heads, length, dim))",
        test="tests/ops/test_opcheck.py::test_small_op[attention_fwd-cpu]",
    ),
    Mutant(
        "a target's own term is left out of the gradient of logits",
        file="csrc/kernels/cpu/cross_entropy.inl",
        text="if (here) {",
        defect="if (false) {",
        test="tests/loss/test_linear_cross_entropy.py::test_float64_gives_pytorchs_loss_and_gradients[plain]",
    ),
    Mutant(
        "gradients made in forward are used up although the graph is retained",
        file="csrc/autograd/loss_function.cpp",
        text="grads.push_back(t.clone());",
        defect="grads.push_back(t);",
        test="tests/loss/test_linear_cross_entropy.py::test_a_second_backward_gives_the_same_again[gradients]",
    ),
    Mutant(
        "adapters of a later piece draw the first piece's mask",
        file="csrc/autograd/loss.cpp",
        text="const AdapterPlace place{row0, 0, C_, {}, tensors_.rng};\n  const Adapters list",
        defect="const AdapterPlace place{0, 0, C_, {}, tensors_.rng};\n  const Adapters list",
        test="tests/loss/test_linear_cross_entropy.py::test_dropout_in_adapters_is_that_of_its_masks[gradients]",
    ),
    Mutant(
        "a release that is not in the ledger",
        file="csrc/ops/ledger.cpp",
        text="    if (ledger->reused(*buffer)) return;\n",
        defect="    if (ledger->reused(*buffer) || buffer->number == 1) return;\n",
        test="tests/cost/test_cost.py::test_launches_and_results[llama-float32-inputs]",
    ),
    Mutant(
        "a product in the ledger with its depth for its columns",
        file="csrc/ops/linear.cpp",
        text="ledger.add(Ledger::product, {n, k, c},",
        defect="ledger.add(Ledger::product, {n, c, k},",
        test="tests/cost/test_cost.py::test_launches_and_results[llama-float32-inputs]",
    ),
    Mutant(
        "the ledger of a GPU with the scratch of a CPU",
        file="csrc/ops/ledger.h",
        text="return ledger != nullptr ? !ledger->device().cuda : t.is_cpu();",
        defect="return ledger != nullptr || t.is_cpu();",
        test="tests/cost/test_cost.py::test_no_float_blocks_on_a_gpu",
        source="ops/linear.cpp",
    ),
    Mutant(
        "the FFN in one piece whatever scratch= says",
        file="csrc/autograd/tiles.h",
        text="return asked > 0 ? asked :",
        defect="return asked < 0 ? asked :",
        test="tests/modules/test_scratch.py::test_the_peak_falls_and_the_gradients_stay[ffn]",
        source="autograd/params.cpp",
    ),
    Mutant(
        "labels of a chunked loss not shifted",
        file="ckptfused/convert/heads.py",
        text='"shift": target is None,',
        defect='"shift": target is not None,',
        test="tests/convert/test_loss_head.py::test_float32[llama]",
    ),
    Mutant(
        "a chunked loss in evaluation, where logits are wanted",
        file="ckptfused/convert/head_forward.py",
        text="if not model.training or not torch.is_grad_enabled()",
        defect="if not torch.is_grad_enabled()",
        test="tests/convert/test_loss_head.py::test_calls_that_may_want_logits_run_as_they_were",
    ),
    Mutant(
        "a chunked loss past a hook on the head",
        file="ckptfused/convert/head_forward.py",
        text='found = projection(module, "the head")',
        defect="found = Projection(module.weight, None)",
        test="tests/convert/test_loss_head.py::test_changes_after_convert_are_seen",
    ),
    Mutant(
        "a head that is sharded by itself, whose hooks do not run",
        file="ckptfused/convert/head_forward.py",
        text="loss = _called(module, loss_of, x) if alone else loss_of(x)",
        defect="loss = loss_of(x)",
        test="tests/convert/test_distributed.py::test_fsdp2_sharded_head[True-False]",
    ),
    Mutant(
        "a batch without targets whose gradients are NaN",
        file="ckptfused/loss/function.py",
        text="nothing = ~counted.any()",
        defect="nothing = counted.new_zeros(())",
        test="tests/convert/test_loss_head.py::test_a_micro_batch_without_targets_spoils_nothing[mean]",
    ),
    Mutant(
        "Gemma's cap of the logits left out of a chunked loss",
        file="ckptfused/convert/heads.py",
        text='{"softcap": model.config.final_logit_softcapping}',
        defect='{"softcap": None}',
        test="tests/convert/test_loss_head.py::test_float32[gemma2]",
    ),
    Mutant(
        "a plan that forgets what backward holds beside what was saved",
        file="ckptfused/policy/chain.py",
        text="max(mode.forward, after + mode.backward)\n            need",
        defect="max(mode.forward, after + mode.saved)\n            need",
        test="tests/policy/test_chain.py::test_modes_against_brute_force[9]",
    ),
    Mutant(
        "a plan that forgets the gradients of later layers",
        file="ckptfused/policy/chain.py",
        text="self._units[begin], self._gradients(begin + 1, end)",
        defect="self._units[begin], 0",
        test="tests/policy/test_chain.py::test_the_gradients_of_later_units_count",
    ),
    Mutant(
        "a plan a step of the front above its budget",
        file="ckptfused/policy/chain.py",
        text='budget, side="right")) - 1',
        defect='budget, side="right"))',
        test="tests/policy/test_chain.py::test_modes_against_brute_force[2]",
    ),
    Mutant(
        "the last of two plans that are alike",
        file="ckptfused/policy/chain.py",
        text="np.lexsort((np.arange(len(need)), ticks, need))",
        defect="np.lexsort((-np.arange(len(need)), ticks, need))",
        test="tests/policy/test_chain.py::test_of_what_is_alike_the_earlier_stays",
    ),
    Mutant(
        "a segment that is replayed without the gradients after it",
        file="ckptfused/policy/chain.py",
        text="self._gradients(split, end) + left.need",
        defect="left.need",
        test="tests/policy/test_chain.py::test_segments_against_exhaustive_search[1]",
    ),
)
