#include "ops/torch.h"

#include "ops/attention_tiles_cpu.h"
#include "ops/linear.h"

namespace ckptfused {
namespace {

// Whether PyTorch's flash kernel does the job: where it can, but for two kinds of shapes where the
// tiles took less time. (ckptfused/cost/attention.py makes the same choice.)
bool flash(const AttentionProblem& a) {
  if (!a.plain() || a.q.numel() == 0 || a.k.numel() == 0) return false;
  // Half precision on a processor without matrix instructions for the type: its backward takes
  // three to four times as long as the tiles, which multiply in float32 as linear.h does.
  if (linear_scratch_bytes(1, 1, 1, a.q.scalar_type()) > 0) return false;
  // Causal lengths of a few hundred: it takes 512 keys at a time and so computes most of what the
  // mask hides (1.3 to 1.4 times the tiles at 512; the limits are counted). The tiles' backward
  // goes a key/value head at a time, of which there must be some.
  const bool few_hundred = a.causal && a.max_keys > 256 && a.max_keys <= 1024;
  return !(few_hundred && a.batch() * a.kv_heads() >= 4);
}

std::tuple<at::Tensor, at::Tensor> attention_fwd(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& mask,
    const OptionalTensor& padding, const OptionalTensor& cu_seqlens,
    const OptionalTensor& rng_state, std::string_view mask_kind, std::string_view padding_kind,
    double scale, bool causal, int64_t window, double softcap, double p) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const AttentionProblem a =
      attention_problem("attention_fwd", q, k, v, mask, padding, cu_seqlens, rng_state, mask_kind,
                        padding_kind, scale, causal, window, softcap, p);
  if (!flash(a)) return attention_tiled_fwd(a);
  const auto [o, lse] = at::_scaled_dot_product_flash_attention_for_cpu(a.q, a.k, a.v, 0.0, causal,
                                                                        std::nullopt, scale);
  // PyTorch gives o the order of q's memory, which is another one where that is sequence-first.
  return {o.transpose(1, 2).contiguous().transpose(1, 2), lse.contiguous()};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_bwd(
    const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& o, const at::Tensor& lse, const OptionalTensor& mask,
    const OptionalTensor& padding, const OptionalTensor& cu_seqlens,
    const OptionalTensor& rng_state, std::string_view mask_kind, std::string_view padding_kind,
    double scale, bool causal, int64_t window, double softcap, double p) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const char* op = "attention_bwd";
  const AttentionProblem a =
      attention_problem(op, q, k, v, mask, padding, cu_seqlens, rng_state, mask_kind, padding_kind,
                        scale, causal, window, softcap, p);
  for (const auto& [name, t] : {std::pair("do", dout), std::pair("o", o)}) {
    TORCH_CHECK(t.sizes() == q.sizes() && t.scalar_type() == q.scalar_type() && t.is_cpu(), op,
                ": ", name, ": expected one like q, ", q.scalar_type(), " ", q.sizes(),
                " on cpu, got ", t.scalar_type(), " ", t.sizes(), " on ", t.device());
    check_memory(op, name, t);
  }
  check_memory(op, "lse", lse);
  const at::Tensor rows = lse.contiguous();
  check_tensor(op, "lse", rows, q.sizes().slice(0, 3), acc_dtype(q.scalar_type()), at::kCPU);
  const at::Tensor dout_rows = attention_operand(dout), o_rows = attention_operand(o);
  if (!flash(a)) return attention_tiled_bwd(a, dout_rows, o_rows, rows);
  return at::_scaled_dot_product_flash_attention_for_cpu_backward(
      dout_rows, a.q, a.k, a.v, o_rows, rows, 0.0, causal, std::nullopt, scale);
}

}  // namespace

TORCH_LIBRARY_IMPL(ckptfused, CPU, m) {
  m.impl("attention_fwd", &attention_fwd);
  m.impl("attention_bwd", &attention_bwd);
}

}  // namespace ckptfused
