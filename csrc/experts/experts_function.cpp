// The dispatcher ops over Experts, and their autograd Function.
#include "ops/torch.h"

#include "autograd/function.h"
#include "autograd/numerics.h"
#include "autograd/saved_memory.h"
#include "block/ops.h"
#include "experts/experts.h"

namespace ckptfused {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using OptTensor = std::optional<Tensor>;
using Adapters = c10::List<OptTensor>;  // up_a, up_b, down_a, down_b; or none of them
using Stored = c10::List<OptTensor>;  // scale, offset, nested_scale, table of up and down, or none

constexpr const char* kOp = "ckptfused::experts";

ExpertsTensors tensors_of(const Tensor& x, const Tensor& ids, const Tensor& weights,
                          const Tensor& up, const OptTensor& up_bias, const Tensor& down,
                          const OptTensor& down_bias, const Adapters& adapters,
                          const Stored& stored, const OptTensor& rng_state) {
  ExpertsTensors made{
      {x, weights, up, up_bias.value_or(Tensor()), down, down_bias.value_or(Tensor())},
      ids,
      rng_state.value_or(Tensor())};
  const auto add = [&](const char* name, const c10::List<OptTensor>& given, size_t end) {
    const size_t count = end - made.slots.size();
    TORCH_CHECK(given.empty() || given.size() == count, "experts: ", name, ": expected ", count,
                " or none, got ", given.size());
    for (const OptTensor& t : given) made.slots.push_back(t.value_or(Tensor()));
    made.slots.resize(end);
  };
  add("adapters", adapters, kExpertsGrads);
  add("stored", stored, kExpertsSlots);
  return made;
}

// The slots from one on and before another, as an op takes them.
c10::List<OptTensor> listed(const variable_list& slots, int from, int end) {
  c10::List<OptTensor> found;
  for (int i = from; i < end; ++i) found.push_back(call::opt(slots[i]));
  return found;
}
Adapters adapters_of(const variable_list& slots) {
  return listed(slots, kExpertsUpA, kExpertsGrads);
}
Stored stored_of(const variable_list& slots) {
  return listed(slots, kExpertsUpState, kExpertsSlots);
}

Tensor experts_fwd(const Tensor& x, const Tensor& ids, const Tensor& weights, const Tensor& up,
                   const OptTensor& up_bias, const Tensor& down, const OptTensor& down_bias,
                   const Adapters& adapters, const Stored& stored, const OptTensor& rng_state,
                   std::string_view spec) {
  const OpGuard guard(x);
  const ExpertsSpec parsed = parse_experts_spec(std::string(spec));
  const auto tensors =
      tensors_of(x, ids, weights, up, up_bias, down, down_bias, adapters, stored, rng_state);
  return Experts(parsed, tensors).forward();
}

std::vector<Tensor> experts_bwd(const Tensor& dy, const Tensor& x, const Tensor& ids,
                                const Tensor& weights, const Tensor& up, const OptTensor& up_bias,
                                const Tensor& down, const OptTensor& down_bias,
                                const Adapters& adapters, const Stored& stored,
                                const OptTensor& rng_state, std::string_view spec,
                                const c10::List<bool>& needs) {
  const OpGuard guard(x);
  const ExpertsSpec parsed = parse_experts_spec(std::string(spec));
  const auto tensors =
      tensors_of(x, ids, weights, up, up_bias, down, down_bias, adapters, stored, rng_state);
  return Experts(parsed, tensors, {needs.begin(), needs.end()}).backward(dy);
}

const auto& fwd_op() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("ckptfused::experts_fwd", "")
                             .typed<decltype(experts_fwd)>();
  return op;
}
const auto& bwd_op() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("ckptfused::experts_bwd", "")
                             .typed<decltype(experts_bwd)>();
  return op;
}

// Saves x, the routing and the caller's own parameters through save_for_backward, so that the
// version counter guards them. The ids are kept as narrow copies, which are nobody else's.
struct ExpertsFunction : torch::autograd::Function<ExpertsFunction> {
  static Tensor forward(AutogradContext* ctx, at::TensorList /*present*/,
                        const ExpertsTensors& tensors, const std::string& spec) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const SettingsGuard settings;
    const std::vector<Tensor>& s = tensors.slots;
    const Tensor y =
        fwd_op().call(s[kExpertsX], tensors.ids, s[kExpertsWeights], s[kExpertsUp],
                      call::opt(s[kExpertsUpBias]), s[kExpertsDown], call::opt(s[kExpertsDownBias]),
                      adapters_of(s), stored_of(s), call::opt(tensors.rng), spec);
    variable_list saved = {narrow_ids(tensors.ids, s[kExpertsUp].size(0))};
    saved.insert(saved.end(), s.begin(), s.end());
    saved.push_back(tensors.rng);
    ctx->saved_data["places"] = places_of(saved);
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["spec"] = spec;
    ctx->saved_data["settings"] = settings.settings();
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& dy) {
    const variable_list saved = ctx->get_saved_variables();
    check_places(saved, ctx->saved_data["places"]);
    const variable_list s(saved.begin() + 1, saved.end() - 1);
    c10::List<bool> needs;
    size_t edges = 0;
    for (size_t i = 0; i < s.size(); ++i) {
      if (i < kExpertsGrads) needs.push_back(s[i].defined() && ctx->needs_input_grad(edges));
      edges += s[i].defined();
    }
    variable_list grads(edges + 2);  // of the present tensors, of the call and its spec
    const SettingsGuard guard(ctx->saved_data["settings"].toIntVector());
    const auto results =
        bwd_op().call(dy[0], s[kExpertsX], saved[0], s[kExpertsWeights], s[kExpertsUp],
                      call::opt(s[kExpertsUpBias]), s[kExpertsDown], call::opt(s[kExpertsDownBias]),
                      adapters_of(s), stored_of(s), call::opt(saved.back()),
                      ctx->saved_data["spec"].toStringRef(), needs);
    size_t next = 0, edge = 0;
    for (size_t i = 0; i < kExpertsGrads; ++i) {
      if (needs.get(i)) grads[edge] = results.at(next++);
      edge += s[i].defined();
    }
    return grads;
  }
};

Tensor experts(const Tensor& x, const Tensor& ids, const Tensor& weights, const Tensor& up,
               const OptTensor& up_bias, const Tensor& down, const OptTensor& down_bias,
               const Adapters& adapters, const Stored& stored, const OptTensor& rng_state,
               std::string_view spec) {
  const auto tensors =
      tensors_of(x, ids, weights, up, up_bias, down, down_bias, adapters, stored, rng_state);
  variable_list present;
  bool any = false;
  for (const Tensor& t : tensors.slots) {
    if (!t.defined()) continue;
    any = any || (at::GradMode::is_enabled() && t.requires_grad());
    present.push_back(t);
  }
  TORCH_CHECK(!any_has_tangent(present), kOp,
              " has no forward-mode derivative (torch.func.jvp, forward_ad): use reverse mode");
  if (any) return ExpertsFunction::apply(at::TensorList(present), tensors, std::string(spec));
  return fwd_op().call(x, ids, weights, up, up_bias, down, down_bias, adapters, stored, rng_state,
                       spec);
}

// Resolves the compute type here and passes it on: nothing below reads thread state.
template <c10::DeviceType kDevice>
Tensor experts_autocast(const Tensor& x, const Tensor& ids, const Tensor& weights, const Tensor& up,
                        const OptTensor& up_bias, const Tensor& down, const OptTensor& down_bias,
                        const Adapters& adapters, const Stored& stored, const OptTensor& rng_state,
                        std::string_view spec) {
  const c10::impl::ExcludeDispatchKeyGuard guard(
      at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
  const auto text = with_compute_type(x, spec, at::autocast::get_autocast_dtype(kDevice));
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(kOp, "").typed<decltype(experts)>();
  return op.call(x, ids, weights, up, up_bias, down, down_bias, adapters, stored, rng_state, text);
}

}  // namespace

TORCH_LIBRARY_IMPL(ckptfused, CompositeImplicitAutograd, m) {
  m.impl("experts", TORCH_FN(experts));
}
TORCH_LIBRARY_IMPL(ckptfused, CPU, m) {
  m.impl("experts_fwd", TORCH_FN(experts_fwd));
  m.impl("experts_bwd", TORCH_FN(experts_bwd));
}
TORCH_LIBRARY_IMPL(ckptfused, CUDA, m) {
  m.impl("experts_fwd", TORCH_FN(experts_fwd));
  m.impl("experts_bwd", TORCH_FN(experts_bwd));
}
TORCH_LIBRARY_IMPL(ckptfused, AutocastCPU, m) {
  m.impl("experts", TORCH_FN(experts_autocast<c10::kCPU>));
}
TORCH_LIBRARY_IMPL(ckptfused, AutocastCUDA, m) {
  m.impl("experts", TORCH_FN(experts_autocast<c10::kCUDA>));
}

}  // namespace ckptfused
