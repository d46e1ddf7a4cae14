#include "ops/torch.h"

#include "ops/qk.h"

namespace ckptfused {
namespace {

RopeKind rope_kind(const char* op, std::string_view kind) {
  if (kind == "none") return RopeKind::none;
  if (kind == "half") return RopeKind::half;
  TORCH_CHECK(kind == "interleaved", op, ": rope: expected none, half or interleaved, got ", kind);
  return RopeKind::interleaved;
}

void check_heads(const char* op, const char* name, const at::Tensor& t, const at::Tensor& like) {
  TORCH_CHECK(t.dim() == 4 && t.sizes() == like.sizes() && t.scalar_type() == like.scalar_type() &&
                  t.device() == like.device() && (t.size(3) <= 1 || t.stride(3) == 1),
              op, ": ", name, ": expected ", like.scalar_type(),
              " [B, T, heads, D] = ", like.sizes(), " on ", like.device(),
              " with contiguous heads, got ", t.scalar_type(), " ", t.sizes(), " strides ",
              t.strides(), " on ", t.device());
  check_memory(op, name, t);
}

}  // namespace

void check_same_tokens(const char* op, const char* name, const at::Tensor& t,
                       const at::Tensor& like) {
  TORCH_CHECK(t.dim() == 4 && like.dim() == 4 && t.size(0) == like.size(0) &&
                  t.size(1) == like.size(1) && t.size(3) == like.size(3) &&
                  t.scalar_type() == like.scalar_type() && t.device() == like.device(),
              op, ": ", name, ": expected ", like.scalar_type(), " [B, T, heads, D] as of ",
              like.sizes(), " on ", like.device(), ", got ", t.scalar_type(), " ", t.sizes(),
              " on ", t.device());
}

HeadsView<const void*> heads_input(const char* op, const char* name, const at::Tensor& t,
                                   const at::Tensor& like) {
  check_heads(op, name, t, like);
  return {t.const_data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
}

HeadsView<void*> heads_output(const char* op, const char* name, const at::Tensor& t,
                              const at::Tensor& like) {
  check_heads(op, name, t, like);
  return {t.mutable_data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
}

QkShape qk_shape(const char* op, const at::Tensor& x, std::string_view norm, double eps,
                 std::string_view rope, int64_t rotary_dim, const OptionalTensor& cos,
                 const OptionalTensor& sin) {
  TORCH_CHECK(x.dim() == 4, op, ": expected [B, T, heads, D], got ", x.sizes());
  const int64_t batch = x.size(0), head_dim = x.size(3);
  const at::ScalarType acc = acc_dtype(x.scalar_type());
  QkShape a{};
  a.dtype = kernel_dtype(op, "x", x);
  a.norm = norm_kind(op, norm);
  TORCH_CHECK(a.norm != NormKind::layerscale, op, ": norm: expected one of heads, got layerscale");
  a.eps = eps;
  a.rope = rope_kind(op, rope);
  a.time = x.size(1);
  a.heads = x.size(2);
  a.head_dim = head_dim;
  if (a.rope == RopeKind::none) return a;

  a.rotary_dim = rotary_dim == 0 ? head_dim : rotary_dim;
  TORCH_CHECK(a.rotary_dim > 0 && a.rotary_dim <= head_dim && a.rotary_dim % 2 == 0, op,
              ": rotary_dim: expected an even number up to head_dim = ", head_dim, ", got ",
              a.rotary_dim);
  TORCH_CHECK(given(cos) && given(sin), op, ": cos, sin: expected both for rope = ", rope, ", got ",
              given(cos) ? "no sin" : "no cos");
  const int64_t batches = cos->dim() == 3 && cos->size(0) == 1 ? 1 : batch;
  const int64_t half = a.rotary_dim / 2;
  check_tensor(op, "cos", *cos, {batches, a.time, half}, acc, x.device());
  check_tensor(op, "sin", *sin, {batches, a.time, half}, acc, x.device());
  a.cos = cos->const_data_ptr();
  a.sin = sin->const_data_ptr();
  a.cos_batch_stride = batches == 1 ? 0 : a.time * half;
  return a;
}

}  // namespace ckptfused
