#include "ops/torch.h"

#include "ops/counted.h"

#include "kernels/cpu/rows.h"

namespace ckptfused::counted {
namespace {

// A kernel over all rows; no rows are no launch.
void launch(const RowCall& call) {
  if (call.rows > 0) Ledger::current()->launched(call.op);
}

void count_attention(const char* op, const at::Tensor& q, const at::Tensor& k, int64_t products) {
  Ledger& ledger = *Ledger::current();
  const Ledger::Name name(products == 2 ? "attention" : "attention backward");
  ledger.add(Ledger::attention, {q.size(0), q.size(1), q.size(2), q.size(3), products, k.size(2)},
             q.scalar_type());
  const CountedDevice& device = ledger.device();
  const auto& kernels = products == 2 ? device.attention_fwd : device.attention_bwd;
  if (device.cuda && q.numel() > 0) ledger.launched(op, kernels.launches);
}

at::Tensor gpu_scratch(const CountedDevice::Attention& kernels) {
  const Ledger::Name name("scratch of attention");
  return at::empty({kernels.scratch}, at::device(at::kMeta).dtype(at::kByte));
}

void count_product(const char* name, int64_t n, int64_t k, int64_t c, const at::Tensor& like) {
  const Ledger::Name named(name);
  Ledger::current()->add(Ledger::product, {n, k, c}, like.scalar_type());
}

}  // namespace

void run(NormFwd, const RowCall& call) {
  launch(call);
}
void run(ResidualFwd, const RowCall& call) {
  launch(call);
}
void run(ActivationFwd, const RowCall& call) {
  launch(call);
}
void run(ActivationBwd, const RowCall& call) {
  launch(call);
}
void run(const QkPartList<QkFwd>& parts) {
  launch(parts[0].call);
}
void run(const QkPartList<QkBwd>& parts) {
  launch(parts[0].call);
}
void run(const std::vector<GradSum>&, DType, const RowCall& call) {
  launch(call);
}
void run(CrossEntropyFwd, const RowCall& call) {
  launch(call);
}
void run(CrossEntropyBwd, const RowCall& call) {
  launch(call);
}
void run(NormBwd, const RowCall& call) {
  launch(call);
}
void run(ResidualBwd, const RowCall& call) {
  launch(call);
}

int64_t grad_chunks(const at::Tensor&, int64_t rows, int64_t cols, int64_t heads) {
  const CountedDevice& device = Ledger::current()->device();
  return device.cuda ? gpu_grad_chunks(rows, cols, heads, device.multiprocessors)
                     : cpu_grad_chunks(rows);
}

std::tuple<at::Tensor, at::Tensor> attention_fwd(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& mask,
    const OptionalTensor& padding, const OptionalTensor& cu_seqlens,
    const OptionalTensor& rng_state, std::string_view mask_kind, std::string_view padding_kind,
    double scale, bool causal, int64_t window, double softcap, double p) {
  count_attention("attention_fwd", q, k, 2);
  const CountedDevice& device = Ledger::current()->device();
  if (!device.cuda) {
    return attention_fwd_cpu(q, k, v, mask, padding, cu_seqlens, rng_state, mask_kind, padding_kind,
                             scale, causal, window, softcap, p);
  }
  const at::Tensor o = attention_buffer(q, q.size(1), q.size(2), false);
  const at::Tensor lse =
      at::empty(q.sizes().slice(0, 3), q.options().dtype(acc_dtype(q.scalar_type())));
  gpu_scratch(device.attention_fwd);
  return {o, lse};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_bwd(
    const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& o, const at::Tensor& lse, const OptionalTensor& mask,
    const OptionalTensor& padding, const OptionalTensor& cu_seqlens,
    const OptionalTensor& rng_state, std::string_view mask_kind, std::string_view padding_kind,
    double scale, bool causal, int64_t window, double softcap, double p) {
  count_attention("attention_bwd", q, k, 5);
  const CountedDevice& device = Ledger::current()->device();
  if (!device.cuda) {
    return attention_bwd_cpu(dout, q, k, v, o, lse, mask, padding, cu_seqlens, rng_state, mask_kind,
                             padding_kind, scale, causal, window, softcap, p);
  }
  const auto like = [](const at::Tensor& t) {
    return attention_buffer(t, t.size(1), t.size(2), false);
  };
  std::tuple<at::Tensor, at::Tensor, at::Tensor> grads = {like(q), like(k), like(v)};
  gpu_scratch(device.attention_bwd);
  return grads;
}

void ffn_up_fwd(const at::Tensor& x, const OptionalTensor& gate_w, const at::Tensor&,
                const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                const at::Tensor& h, const OptionalTensor&, const OptionalTensor&, std::string_view,
                bool, double, int64_t, int64_t, int64_t, int64_t, at::IntArrayRef,
                std::string_view) {
  if (given(gate_w)) count_product("gu", x.size(0), h.size(1), x.size(1), x);
  count_product("gu", x.size(0), h.size(1), x.size(1), x);
  Ledger::current()->launched("ffn_up_fwd");
}

void ffn_up_bwd(const OptionalTensor& x, const OptionalTensor& gate_w, const OptionalTensor&,
                const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                const OptionalTensor&, const at::Tensor& ddown, const at::Tensor& down_w,
                const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                const OptionalTensor&, std::string_view, bool transposed, double, int64_t, int64_t,
                int64_t, int64_t, at::IntArrayRef, std::string_view) {
  const int64_t hidden = down_w.size(transposed ? 0 : 1);
  if (given(x)) {
    if (given(gate_w)) count_product("gu", x->size(0), hidden, x->size(1), *x);
    count_product("gu", x->size(0), hidden, x->size(1), *x);
  }
  count_product("d h", ddown.size(0), hidden, ddown.size(1), ddown);
  Ledger::current()->launched("ffn_up_bwd");
}

}  // namespace ckptfused::counted
