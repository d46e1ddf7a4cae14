// The dispatcher ops over LossHead, and the autograd Function of a loss.
#include "ops/torch.h"

#include <algorithm>

#include <ATen/FunctionalTensorWrapper.h>
#include <torch/csrc/autograd/engine.h>

#include "autograd/function.h"
#include "autograd/numerics.h"
#include "autograd/saved_memory.h"
#include "loss/loss.h"
#include "loss/reduction.h"

namespace ckptfused {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "ckptfused::linear_cross_entropy";

// What a call takes, as ops take it.
struct LossArgs {
  Tensor x, weight;
  std::optional<Tensor> bias;
  Tensor target;
  std::optional<Tensor> class_weight;
  OptTensorList adapters;

  // x, weight, bias and the adapters' tensors; undefined where absent.
  variable_list differentiable() const {
    variable_list list = {x, weight, bias.value_or(Tensor())};
    for (size_t i = 0; i < adapters.size(); ++i) {
      list.push_back(adapters.get(i).value_or(Tensor()));
    }
    return list;
  }
  LossTensors tensors(const std::optional<Tensor>& rng_state) const {
    const variable_list list = differentiable();
    return {x,
            weight,
            list[kLossBias],
            target,
            class_weight.value_or(Tensor()),
            {list.begin() + kLossAdapters, list.end()},
            rng_state.value_or(Tensor())};
  }
};

std::vector<bool> as_bools(const c10::List<bool>& list) {
  return {list.begin(), list.end()};
}

std::vector<Tensor> loss_fwd(const Tensor& x, const Tensor& weight,
                             const std::optional<Tensor>& bias, const Tensor& target,
                             const std::optional<Tensor>& class_weight,
                             const OptTensorList& adapters, const std::optional<Tensor>& rng_state,
                             std::string_view spec, const c10::List<bool>& needs) {
  const OpGuard guard(x);
  const auto parsed = parse_loss_spec(std::string(spec));
  const LossArgs args{x, weight, bias, target, class_weight, adapters};
  return LossHead(*parsed, args.tensors(rng_state), as_bools(needs)).forward();
}

// The gradients scaled by dloss where it is one number, in their tensors' types.
std::vector<Tensor> in_own_types(const variable_list& grads, const variable_list& tensors,
                                 const std::vector<bool>& needs) {
  std::vector<Tensor> result;
  size_t next = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (needs[i]) result.push_back(grads.at(next++).to(tensors[i].scalar_type()));
  }
  return result;
}

std::vector<Tensor> loss_bwd(const Tensor& dloss, const Tensor& x, const Tensor& weight,
                             const std::optional<Tensor>& bias, const Tensor& target,
                             const std::optional<Tensor>& class_weight,
                             const OptTensorList& adapters, const Tensor& lse, at::TensorList kept,
                             const std::optional<Tensor>& rng_state, std::string_view spec,
                             const c10::List<bool>& needs) {
  const OpGuard guard(x);
  const LossArgs args{x, weight, bias, target, class_weight, adapters};
  variable_list grads;
  if (kept.empty()) {
    const auto parsed = parse_loss_spec(std::string(spec));
    grads = LossHead(*parsed, args.tensors(rng_state), as_bools(needs)).backward(dloss, lse);
  } else {
    for (const Tensor& t : kept) {
      grads.push_back(t.clone());
      scale_gradient(grads.back(), dloss);
    }
  }
  return in_own_types(grads, args.differentiable(), as_bools(needs));
}

const auto& fwd_op() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("ckptfused::linear_cross_entropy_fwd", "")
                             .typed<decltype(loss_fwd)>();
  return op;
}
const auto& bwd_op() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("ckptfused::linear_cross_entropy_bwd", "")
                             .typed<decltype(loss_bwd)>();
  return op;
}

// What the Function is given beside its variables.
struct LossCall {
  LossArgs args;
  std::optional<Tensor> rng_state;
  std::string spec;
  std::vector<bool> needs;  // of x, weight, bias and each adapter's tensor
  bool per_token, keep_gradients;
  at::IValue count;  // of the targets that a mean is over; None where the loss is no mean
};

// Whether a backward may use up the gradients that forward made: nobody asks for them again, by
// another dloss of a batch either, and they are memory, not a trace of it.
bool may_use_up(const variable_list& grads, const Tensor& dloss) {
  constexpr c10::DispatchKeySet batched(
      {c10::DispatchKey::Batched, c10::DispatchKey::FuncTorchBatched});
  return !dloss.key_set().has_any(batched) && !at::GradMode::is_enabled() &&
         !torch::autograd::get_current_graph_task_keep_graph() &&
         std::none_of(grads.begin(), grads.end(), [](const Tensor& t) {
           return t.unsafeGetTensorImpl()->is_python_dispatch() ||
                  at::functionalization::impl::isFunctionalTensor(t);
         });
}

// Saves x, the caller's own tensors and 16 bytes of random state, through save_for_backward, so
// that the version counter guards them; and either the log-sum-exp, or the gradients themselves,
// which are nobody else's and are scaled in place by the last backward.
struct LossFunction : torch::autograd::Function<LossFunction> {
  static variable_list forward(AutogradContext* ctx, at::TensorList /*present*/,
                               const LossCall& call) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const SettingsGuard settings;
    ctx->set_materialize_grads(false);
    const LossArgs& a = call.args;
    c10::List<bool> needs;
    for (const bool need : call.needs) needs.push_back(need && call.keep_gradients);
    variable_list made = fwd_op().call(a.x, a.weight, a.bias, a.target, a.class_weight, a.adapters,
                                       call.rng_state, call.spec, needs);
    variable_list saved = {a.target, a.class_weight.value_or(Tensor()),
                           call.rng_state.value_or(Tensor()), made[1],
                           call.count.isTensor() ? call.count.toTensor() : Tensor()};
    for (const Tensor& t : a.differentiable()) saved.push_back(t);
    ctx->saved_data["places"] = places_of(saved);
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["kept"] = c10::List<Tensor>(at::TensorList(made).slice(3));
    ctx->saved_data["needs"] = needs;
    ctx->saved_data["spec"] = call.spec;
    ctx->saved_data["settings"] = settings.settings();
    ctx->saved_data["count"] = call.count.isTensor() ? at::IValue() : call.count;
    const Tensor loss = reduced(made[0], call.per_token, call.count);
    ctx->mark_non_differentiable({made[0], made[1], made[2]});
    return {loss, made[0], made[1], made[2]};
  }

  static variable_list backward(AutogradContext* ctx, variable_list dloss) {
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &target = saved[0], &class_weight = saved[1], &rng = saved[2], &lse = saved[3];
    const at::IValue count = saved[4].defined() ? saved[4] : ctx->saved_data["count"];
    const variable_list tensors(saved.begin() + 5, saved.end());
    c10::List<bool> needs;
    size_t edges = 0;
    for (const Tensor& t : tensors) {
      needs.push_back(t.defined() && ctx->needs_input_grad(edges));
      edges += t.defined();
    }
    variable_list grads(edges + 1);  // of the present tensors, and LossCall
    if (!dloss[0].defined()) return grads;
    if (!count.isNone()) dloss[0] = divided(dloss[0], count, 1);
    const variable_list kept = wanted(ctx, needs);
    // Else it reads no weight.
    if (kept.empty() || at::GradMode::is_enabled()) check_places(saved, ctx->saved_data["places"]);
    variable_list results;
    if (!kept.empty() && may_use_up(kept, dloss[0])) {
      for (const Tensor& t : kept) scale_gradient(t, dloss[0]);
      results = in_own_types(kept, tensors, as_bools(needs));
      ctx->saved_data.erase("kept");
    } else {
      const SettingsGuard guard(ctx->saved_data["settings"].toIntVector());
      OptTensorList adapters;
      for (size_t i = kLossAdapters; i < tensors.size(); ++i)
        adapters.push_back(call::opt(tensors[i]));
      results =
          bwd_op().call(dloss[0], tensors[kLossX], tensors[kLossWeight],
                        call::opt(tensors[kLossBias]), target, call::opt(class_weight), adapters,
                        lse, kept, call::opt(rng), ctx->saved_data["spec"].toStringRef(), needs);
    }
    size_t next = 0, edge = 0;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (needs.get(i)) grads[edge] = results.at(next++);
      edge += tensors[i].defined();
    }
    return grads;
  }

 private:
  // Of the kept gradients those that this backward asks for.
  static variable_list wanted(AutogradContext* ctx, const c10::List<bool>& needs) {
    const auto kept = ctx->saved_data["kept"].toTensorVector();
    const auto made = ctx->saved_data["needs"].toBoolList();
    variable_list found;
    size_t next = 0;
    for (size_t i = 0; i < made.size(); ++i) {
      if (made.get(i) && needs.get(i)) found.push_back(kept.at(next));
      next += made.get(i);
    }
    return found;
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor> linear_cross_entropy(
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const Tensor& target,
    const std::optional<Tensor>& class_weight, const OptTensorList& adapters,
    std::string_view spec_text, const std::optional<at::Generator>& generator) {
  const auto spec = parse_loss_spec(std::string(spec_text));
  LossCall call{{x, weight, bias, target, class_weight, adapters},
                {},
                std::string(spec_text),
                {},
                spec->per_token(),
                spec->keep_gradients() && !spec->per_token(),
                {}};
  if (spec->reduction == "mean") call.count = number_of_targets(target, spec->ignore_index);
  variable_list present;
  bool any = false;
  for (const Tensor& t : call.args.differentiable()) {
    call.needs.push_back(at::GradMode::is_enabled() && t.defined() && t.requires_grad());
    any = any || call.needs.back();
    if (t.defined()) present.push_back(t);
  }
  if (spec->has_dropout()) call.rng_state = call::rng_state(x, next_call_id(), generator);
  TORCH_CHECK(!any_has_tangent(present), kOp,
              " has no forward-mode derivative (torch.func.jvp, forward_ad): use reverse mode");
  TORCH_CHECK(!class_weight || !at::GradMode::is_enabled() || !class_weight->requires_grad(), kOp,
              ": class_weight: expected a tensor that needs no gradient");
  if (any) {
    const variable_list made = LossFunction::apply(at::TensorList(present), call);
    return {made[0], made[1], made[2], made[3]};
  }
  c10::List<bool> needs;
  for (size_t i = 0; i < call.needs.size(); ++i) needs.push_back(false);
  const variable_list made = fwd_op().call(x, weight, bias, target, class_weight, adapters,
                                           call.rng_state, spec_text, needs);
  return {reduced(made[0], spec->per_token(), call.count), made[0], made[1], made[2]};
}

// Resolves the compute type here and passes it on: nothing below reads thread state.
template <c10::DeviceType kDevice>
std::tuple<Tensor, Tensor, Tensor, Tensor> loss_autocast(
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const Tensor& target,
    const std::optional<Tensor>& class_weight, const OptTensorList& adapters, std::string_view spec,
    const std::optional<at::Generator>& generator) {
  const c10::impl::ExcludeDispatchKeyGuard guard(
      at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow(kOp, "")
                             .typed<decltype(linear_cross_entropy)>();
  return op.call(x, weight, bias, target, class_weight, adapters,
                 with_compute_type(x, spec, at::autocast::get_autocast_dtype(kDevice)), generator);
}

}  // namespace

TORCH_LIBRARY_IMPL(ckptfused, CompositeImplicitAutograd, m) {
  m.impl("linear_cross_entropy", TORCH_FN(linear_cross_entropy));
}
TORCH_LIBRARY_IMPL(ckptfused, CPU, m) {
  m.impl("linear_cross_entropy_fwd", TORCH_FN(loss_fwd));
  m.impl("linear_cross_entropy_bwd", TORCH_FN(loss_bwd));
}
TORCH_LIBRARY_IMPL(ckptfused, CUDA, m) {
  m.impl("linear_cross_entropy_fwd", TORCH_FN(loss_fwd));
  m.impl("linear_cross_entropy_bwd", TORCH_FN(loss_bwd));
}
TORCH_LIBRARY_IMPL(ckptfused, AutocastCPU, m) {
  m.impl("linear_cross_entropy", TORCH_FN(loss_autocast<c10::kCPU>));
}
TORCH_LIBRARY_IMPL(ckptfused, AutocastCUDA, m) {
  m.impl("linear_cross_entropy", TORCH_FN(loss_autocast<c10::kCUDA>));
}

}  // namespace ckptfused
