// A block call on meta tensors, with a ledger.
#include "ops/torch.h"

#include "block/count.h"

#include "block/block.h"

namespace ckptfused {
namespace {

using at::Tensor;

// No mode, wrapper or transform of the caller sees the calls of a count, nor autograd or autocast.
class Undisturbed {
 public:
  Undisturbed() : guard_(keys()) {}

 private:
  static c10::impl::LocalDispatchKeySet keys() {
    c10::impl::PODLocalDispatchKeySet state{};
    state.set_excluded(c10::default_excluded_set |
                       c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    return c10::impl::LocalDispatchKeySet(state);
  }
  c10::impl::ForceDispatchKeyGuard guard_;
};

// The arguments of a call, outside of its ledger: the caller has them already.
struct Arguments {
  std::shared_ptr<const BlockSpec> spec;
  Tensor x;
  OptTensorList params, aux;
  std::optional<Tensor> rng;

  explicit Arguments(const CountedCall& call)
      : spec(parse_spec(call.spec)), x(meta(call.sizes, call.dtype)) {
    for (const std::optional<CountedCall::Param>& p : call.params) {
      params.push_back(p ? std::optional(meta(p->sizes, p->dtype)) : std::nullopt);
    }
    aux = aux_tensors(call);
    if (spec->has_dropout()) rng = meta({2}, at::kLong);
  }

 private:
  static Tensor meta(at::IntArrayRef sizes, at::ScalarType dtype) {
    return at::empty(sizes, at::device(at::kMeta).dtype(dtype));
  }

  OptTensorList aux_tensors(const CountedCall& call) const {
    OptTensorList list;
    for (int slot = 0; slot < kAuxSlots; ++slot) list.push_back(std::nullopt);
    if (!spec->has_attn) return list;
    const AttentionSpec& a = spec->attn;
    const int64_t B = call.sizes[spec->seq_first ? 1 : 0], T = call.sizes[spec->seq_first ? 0 : 1];
    const auto mask_type = [&](const std::string& kind) {
      return kind == "add" ? call.dtype : at::kBool;
    };
    const auto set_table = [&](int slot, at::IntArrayRef sizes, at::ScalarType dtype) {
      const bool given = !call.tables.empty() && call.tables[slot];
      list.set(slot, given ? meta(call.tables[slot]->sizes, call.tables[slot]->dtype)
                           : meta(sizes, dtype));
    };
    if (a.rope != "none") {
      const at::ScalarType acc = call.dtype == at::kDouble ? at::kDouble : at::kFloat;
      for (const int slot : {kCos, kSin}) set_table(slot, {T, a.rotary_dim / 2}, acc);
    }
    if (a.q_scale) {
      const bool own = spec->compute == at::ScalarType::Undefined;
      set_table(kQScale, {T}, own ? call.dtype : spec->compute);
    }
    if (a.mask != "none") list.set(kMask, meta({1, 1, T, T}, mask_type(a.mask)));
    if (a.padding != "none") list.set(kPadding, meta({B, T}, mask_type(a.padding)));
    if (a.packed) {
      const std::vector<int64_t> whole = {0, T};
      list.set(kCuSeqlens,
               at::tensor(call.cu_seqlens.empty() ? whole : call.cu_seqlens, at::kLong));
    }
    return list;
  }
};

bool keeps_something(const KeepSpec& keep) {
  return keep.attn || keep.mid || keep.proj || keep.qkv || keep.gu || keep.out;
}

}  // namespace

std::vector<Ledger::Event> count_forward(const CountedCall& call, const CountedDevice& device,
                                         bool save) {
  const Undisturbed undisturbed;
  const Arguments given(call);
  const Ledger ledger(device);
  std::vector<Tensor> result;
  {
    Block block(*given.spec, given.x, given.params, given.aux, given.rng);
    result = block.forward(save);
  }
  return ledger.events();
}

std::vector<Ledger::Event> count_backward(const CountedCall& call, const CountedDevice& device,
                                          const std::vector<bool>& needs) {
  const Undisturbed undisturbed;
  const Arguments given(call);
  std::vector<Tensor> kept;
  if (keeps_something(given.spec->keep)) {
    const Ledger forward(device);
    kept = Block(*given.spec, given.x, given.params, given.aux, given.rng).forward(true);
    kept.erase(kept.begin());
  }
  const Tensor dy = at::empty_like(given.x);
  const Ledger ledger(device);
  std::vector<Tensor> result;
  {
    Block block(*given.spec, given.x, given.params, given.aux, given.rng);
    result = block.backward(dy, kept, needs);
  }
  return ledger.events();
}

}  // namespace ckptfused
