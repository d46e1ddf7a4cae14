#include "ops/torch.h"

#include <ATen/native/CPUBlas.h>

#include <algorithm>

#include "ops/attention_tiles_cpu.h"
#include "ops/ledger.h"
#include "ops/linear.h"

namespace ckptfused {
namespace {

// Of float32: our tiles copy their operands, which takes long where there is little to multiply.
constexpr int64_t kShortSequence = 64;

// Whether PyTorch's flash kernel does the job; a count notes it.
bool use_flash(const AttentionProblem& a) {
  const bool used = attention_is_flash(a.shape());
  counted_launch(used ? "flash attention" : "tiled attention");
  return used;
}

// While a ledger is open: what PyTorch's flash kernel allocates within itself. dout: of backward,
// which copies it unless it lies token by token.
void count_flash_scratch(const AttentionProblem& a, const at::Tensor* dout) {
  const Ledger::Name name("scratch of attention");
  int64_t bytes = flash_scratch_bytes(a.q.scalar_type(), a.batch() * a.kv_heads(), a.q.size(2),
                                      a.k.size(2), a.q.size(3), cpu_threads(), dout != nullptr);
  if (dout != nullptr && !dout->transpose(1, 2).is_contiguous()) bytes += dout->nbytes();
  at::empty({bytes}, a.q.options().dtype(at::kByte));
}

// What PyTorch's flash kernel returns: o in the order of q's memory, lse [B, T, H] there.
std::tuple<at::Tensor, at::Tensor> flash_outputs(const AttentionProblem& a) {
  const at::Tensor lse = at::empty({a.batch(), a.q.size(2), a.heads()},
                                   a.q.options().dtype(acc_dtype(a.q.scalar_type())));
  return {at::empty_like(a.q), lse.transpose(1, 2)};
}

// Whether PyTorch's forward lays keys and values out for the processor's matrix tiles (AMX) first.
bool packs(at::ScalarType dtype, int64_t queries, int64_t keys) {
  return dtype != acc_dtype(dtype) && std::min(queries, keys) >= 64 &&
         at::native::cpublas::could_pack(dtype);
}

}  // namespace

// Flash for what is left of its advantage: our tiles take 0.5 to 0.9 times its time for forward and
// backward in float32, 0.2 to 0.7 in half precision.
bool attention_is_flash(const AttentionShape& shape, std::string* reason) {
  const auto because = [&](bool answer, const auto&... parts) {
    if (reason != nullptr) *reason = c10::str(parts...);
    return answer;
  };
  if (!shape.plain()) {
    return reason != nullptr && because(false, "PyTorch's kernel has ", shape.missing());
  }
  if (std::min({shape.batch, shape.heads, shape.queries, shape.head_dim}) == 0) {
    return because(false, "nothing to compute");
  }
  if (shape.dtype == at::kDouble) return because(true, "float64, which its library multiplies");
  if (shape.dtype == at::kFloat && shape.keys <= kShortSequence) {
    return because(true, "at most ", kShortSequence, " keys in float32, for which it does less");
  }
  return because(false, "faster than PyTorch's kernel here");
}

int64_t flash_scratch_bytes(at::ScalarType dtype, int64_t kv_heads, int64_t queries, int64_t keys,
                            int64_t head_dim, int64_t threads, bool backward) {
  const int64_t rows = std::min<int64_t>(queries, queries >= 768 ? 256 : queries >= 192 ? 64 : 32);
  const int64_t scores = rows * std::min<int64_t>(keys, 512);
  const int64_t wide = c10::elementSize(acc_dtype(dtype));
  const int64_t narrow = dtype == acc_dtype(dtype) ? 0 : c10::elementSize(dtype);
  if (!backward) {
    const int64_t buffers = threads * ((scores + rows * (head_dim + 2)) * wide + scores * narrow);
    if (!packs(dtype, queries, keys)) return buffers;
    // Keys, values and a block of values as they were; tiles hold two rows in turns, so that an odd
    // number of queries' elements, of values or of scores has one more beside it.
    const int64_t block = std::min<int64_t>(keys, 512), odd = head_dim % 2;
    const int64_t packed = kv_heads * (keys * (head_dim + odd) + (keys + keys % 2) * head_dim);
    const int64_t each = block * head_dim + rows * (block % 2 + odd * (head_dim + 1));
    return buffers + (packed + threads * each) * narrow;
  }
  // Beside two tiles of scores the sums of rows: of one thread, others' are as small.
  return threads * 2 * scores * (wide + narrow) + rows * wide;
}

std::tuple<at::Tensor, at::Tensor> attention_fwd_cpu(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& mask,
    const OptionalTensor& padding, const OptionalTensor& cu_seqlens,
    const OptionalTensor& rng_state, std::string_view mask_kind, std::string_view padding_kind,
    double scale, bool causal, int64_t window, double softcap, double p) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const AttentionProblem a =
      attention_problem("attention_fwd", q, k, v, mask, padding, cu_seqlens, rng_state, mask_kind,
                        padding_kind, scale, causal, window, softcap, p);
  if (!use_flash(a)) return attention_tiled_fwd(a);
  const bool counted = counting();
  const auto [o, lse] = counted ? flash_outputs(a)
                                : at::_scaled_dot_product_flash_attention_for_cpu(
                                      a.q, a.k, a.v, 0.0, causal, std::nullopt, scale);
  if (counted) count_flash_scratch(a, nullptr);
  // PyTorch gives o the order of q's memory, which is another one where that is sequence-first.
  return {o.transpose(1, 2).contiguous().transpose(1, 2), lse.contiguous()};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_bwd_cpu(
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
  const AttentionResult result = attention_result(op, a, dout, o, lse);
  if (!use_flash(a)) return attention_tiled_bwd(a, result.dout, result.o, result.lse);
  if (counting()) {
    std::tuple<at::Tensor, at::Tensor, at::Tensor> grads = {at::empty_like(q), at::empty_like(k),
                                                            at::empty_like(v)};
    count_flash_scratch(a, &result.dout);
    return grads;
  }
  return at::_scaled_dot_product_flash_attention_for_cpu_backward(
      result.dout, a.q, a.k, a.v, result.o, result.lse, 0.0, causal, std::nullopt, scale);
}

TORCH_LIBRARY_IMPL(ckptfused, CPU, m) {
  m.impl("attention_fwd", &attention_fwd_cpu);
  m.impl("attention_bwd", &attention_bwd_cpu);
}

}  // namespace ckptfused
