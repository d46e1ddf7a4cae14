// The dispatcher ops over Block, and the autograd Functions that save a block's inputs.
#include "ops/torch.h"

#include <algorithm>

#include "autograd/function.h"
#include "autograd/numerics.h"
#include "autograd/saved_memory.h"
#include "block/block.h"

namespace ckptfused {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

enum class Halves { both, attention, ffn };

template <Halves kHalves>
struct Names;
template <>
struct Names<Halves::both> {
  static constexpr const char* op = "ckptfused::block";
  static constexpr const char* fwd = "ckptfused::block_fwd";
  static constexpr const char* bwd = "ckptfused::block_bwd";
};
template <>
struct Names<Halves::attention> {
  static constexpr const char* op = "ckptfused::attention_block";
  static constexpr const char* fwd = "ckptfused::attention_block_fwd";
  static constexpr const char* bwd = "ckptfused::attention_block_bwd";
};
template <>
struct Names<Halves::ffn> {
  static constexpr const char* op = "ckptfused::ffn_block";
  static constexpr const char* fwd = "ckptfused::ffn_block_fwd";
  static constexpr const char* bwd = "ckptfused::ffn_block_bwd";
};

template <Halves kHalves>
std::shared_ptr<const BlockSpec> checked_spec(std::string_view text) {
  std::shared_ptr<const BlockSpec> spec = parse_spec(std::string(text));
  TORCH_CHECK(
      spec->has_attn == (kHalves != Halves::ffn) && spec->has_ffn == (kHalves != Halves::attention),
      Names<kHalves>::op, ": the spec has other halves: '", text, "'");
  return spec;
}

// bool[] as the dispatcher passes it.
using BoolList = c10::List<bool>;

template <Halves kHalves>
std::vector<Tensor> block_fwd(const Tensor& x, const OptTensorList& params,
                              const OptTensorList& aux, const std::optional<Tensor>& rng_state,
                              std::string_view spec, bool save) {
  const OpGuard guard(x);
  const auto parsed = checked_spec<kHalves>(spec);
  return Block(*parsed, x, params, aux, rng_state).forward(save);
}

template <Halves kHalves>
std::vector<Tensor> block_bwd(const Tensor& dy, const Tensor& x, const OptTensorList& params,
                              const OptTensorList& aux, at::TensorList kept,
                              const std::optional<Tensor>& rng_state, std::string_view spec,
                              const BoolList& needs) {
  const OpGuard guard(x);
  const auto parsed = checked_spec<kHalves>(spec);
  return Block(*parsed, x, params, aux, rng_state)
      .backward(dy, kept, std::vector<bool>(needs.begin(), needs.end()));
}

template <Halves kHalves>
const auto& fwd_op() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow(Names<kHalves>::fwd, "")
                             .template typed<decltype(block_fwd<kHalves>)>();
  return op;
}
template <Halves kHalves>
const auto& bwd_op() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow(Names<kHalves>::bwd, "")
                             .template typed<decltype(block_bwd<kHalves>)>();
  return op;
}

// The tensors that are there, as autograd takes them: a Function's inputs are its variables.
variable_list present(const OptTensorList& list) {
  variable_list tensors;
  for (size_t i = 0; i < list.size(); ++i) {
    const std::optional<Tensor> t = list.get(i);
    if (t.has_value() && t->defined()) tensors.push_back(*t);
  }
  return tensors;
}
bool any_wants_grad(const variable_list& tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const Tensor& t) { return t.requires_grad(); });
}

// What a block call takes beside x: no variables to autograd, which is given the present
// parameters as a list.
struct BlockArgs {
  OptTensorList params, aux;
  std::optional<Tensor> rng_state;
  std::string spec;
};

// Saves x, the caller's own tensors, 16 bytes of random state and the kept values. All of it goes
// through save_for_backward, so that the version counter guards it.
template <Halves kHalves>
struct BlockFunction : torch::autograd::Function<BlockFunction<kHalves>> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, at::TensorList /*present*/,
                        const BlockArgs& args) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const SettingsGuard settings;
    std::vector<Tensor> outputs =
        fwd_op<kHalves>().call(x, args.params, args.aux, args.rng_state, args.spec, true);
    variable_list saved = {x, args.rng_state.value_or(Tensor())};
    for (size_t i = 0; i < args.params.size(); ++i) {
      saved.push_back(args.params.get(i).value_or(Tensor()));
    }
    for (size_t i = 0; i < args.aux.size(); ++i) {
      saved.push_back(args.aux.get(i).value_or(Tensor()));
    }
    saved.insert(saved.end(), outputs.begin() + 1, outputs.end());
    ctx->saved_data["places"] = places_of(saved);
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["spec"] = args.spec;
    ctx->saved_data["params"] = int64_t(args.params.size());
    ctx->saved_data["settings"] = settings.settings();
    return outputs[0];
  }

  static variable_list backward(AutogradContext* ctx, variable_list dy) {
    const variable_list saved = ctx->get_saved_variables();
    const int64_t n_params = ctx->saved_data["params"].toInt();
    variable_list grads = {Tensor()};  // of x, the present parameters, and BlockArgs
    for (int64_t i = 0; i < n_params; ++i) {
      if (saved[2 + i].defined()) grads.emplace_back();
    }
    grads.emplace_back();
    if (!dy[0].defined()) return grads;
    check_places(saved, ctx->saved_data["places"]);

    const auto optional = [&](int64_t begin, int64_t count) {
      OptTensorList list;
      for (int64_t i = begin; i < begin + count; ++i) list.push_back(call::opt(saved[i]));
      return list;
    };
    const OptTensorList params = optional(2, n_params), aux = optional(2 + n_params, kAuxSlots);
    // Edges belong to the inputs that are there: x, then the present parameters.
    BoolList needs;
    size_t edge = 0;
    needs.push_back(ctx->needs_input_grad(edge++));
    for (int64_t i = 0; i < n_params; ++i) {
      needs.push_back(saved[2 + i].defined() && ctx->needs_input_grad(edge++));
    }
    const SettingsGuard guard(ctx->saved_data["settings"].toIntVector());
    std::vector<Tensor> results = bwd_op<kHalves>().call(
        dy[0], saved[0], params, aux, at::ArrayRef<Tensor>(saved).slice(2 + n_params + kAuxSlots),
        call::opt(saved[1]), ctx->saved_data["spec"].toStringRef(), needs);
    size_t next = 0;
    for (edge = 0; edge + 1 < grads.size(); ++edge) {
      if (ctx->needs_input_grad(edge)) grads[edge] = results.at(next++);
    }
    return grads;
  }
};

// Only grad mode and requires_grad decide whether anything is saved.
template <Halves kHalves>
Tensor block(const Tensor& x, const OptTensorList& params, const OptTensorList& aux,
             std::string_view spec_text, const std::optional<at::Generator>& generator) {
  const auto spec = checked_spec<kHalves>(spec_text);
  const variable_list inputs = present(params);
  TORCH_CHECK(!x._fw_grad(/*level=*/0).defined() && !any_has_tangent(inputs), Names<kHalves>::op,
              " has no forward-mode derivative (torch.func.jvp, forward_ad): use reverse mode");
  const Tensor rng = spec->has_dropout() ? call::rng_state(x, next_call_id(), generator) : Tensor();
  TORCH_CHECK(!at::GradMode::is_enabled() || !any_wants_grad(present(aux)),
              "ckptfused: a mask, cos or sin that needs a gradient is not supported");
  if (!at::GradMode::is_enabled() || !(x.requires_grad() || any_wants_grad(inputs))) {
    return fwd_op<kHalves>().call(x, params, aux, call::opt(rng), spec_text, false)[0];
  }
  return BlockFunction<kHalves>::apply(
      x, at::TensorList(inputs), BlockArgs{params, aux, call::opt(rng), std::string(spec_text)});
}

// Resolves the compute type here and passes it on: nothing below reads thread state.
template <Halves kHalves, c10::DeviceType kDevice>
Tensor block_autocast(const Tensor& x, const OptTensorList& params, const OptTensorList& aux,
                      std::string_view spec, const std::optional<at::Generator>& generator) {
  const c10::impl::ExcludeDispatchKeyGuard guard(
      at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
  const at::ScalarType type = at::autocast::get_autocast_dtype(kDevice);
  TORCH_CHECK(
      x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble || x.scalar_type() == type,
      "ckptfused: autocast to ", type, " needs a float32 residual stream, got ", x.scalar_type());
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow(Names<kHalves>::op, "")
                             .template typed<decltype(block<kHalves>)>();
  return op.call(x, params, aux, with_compute_type(x, spec, type), generator);
}

std::string local(const char* qualified) {
  return std::string(qualified).substr(std::string("ckptfused::").size());
}

template <Halves kHalves>
void register_composite(torch::Library& m) {
  m.impl(local(Names<kHalves>::op).c_str(), TORCH_FN(block<kHalves>));
}
template <Halves kHalves>
void register_backend(torch::Library& m) {
  m.impl(local(Names<kHalves>::fwd).c_str(), TORCH_FN(block_fwd<kHalves>));
  m.impl(local(Names<kHalves>::bwd).c_str(), TORCH_FN(block_bwd<kHalves>));
}
template <Halves kHalves, c10::DeviceType kDevice>
void register_autocast(torch::Library& m) {
  m.impl(local(Names<kHalves>::op).c_str(), TORCH_FN((block_autocast<kHalves, kDevice>)));
}

}  // namespace

TORCH_LIBRARY_IMPL(ckptfused, CompositeImplicitAutograd, m) {
  register_composite<Halves::both>(m);
  register_composite<Halves::attention>(m);
  register_composite<Halves::ffn>(m);
}
TORCH_LIBRARY_IMPL(ckptfused, CPU, m) {
  register_backend<Halves::both>(m);
  register_backend<Halves::attention>(m);
  register_backend<Halves::ffn>(m);
}
TORCH_LIBRARY_IMPL(ckptfused, CUDA, m) {
  register_backend<Halves::both>(m);
  register_backend<Halves::attention>(m);
  register_backend<Halves::ffn>(m);
}
TORCH_LIBRARY_IMPL(ckptfused, AutocastCPU, m) {
  register_autocast<Halves::both, c10::kCPU>(m);
  register_autocast<Halves::attention, c10::kCPU>(m);
  register_autocast<Halves::ffn, c10::kCPU>(m);
}
TORCH_LIBRARY_IMPL(ckptfused, AutocastCUDA, m) {
  register_autocast<Halves::both, c10::kCUDA>(m);
  register_autocast<Halves::attention, c10::kCUDA>(m);
  register_autocast<Halves::ffn, c10::kCUDA>(m);
}

}  // namespace ckptfused
