#include "ops/torch.h"

#include "kernels/cpu/rope.h"
#include "ops/row_args.h"

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
                  t.is_cpu() && (t.size(3) <= 1 || t.stride(3) == 1),
              op, ": ", name, ": expected ", like.scalar_type(),
              " [B, T, heads, D] = ", like.sizes(), " on cpu with contiguous heads, got ",
              t.scalar_type(), " ", t.sizes(), " strides ", t.strides(), " on ", t.device());
}

HeadsView<const void*> input(const char* op, const char* name, const at::Tensor& t,
                             const at::Tensor& like) {
  check_heads(op, name, t, like);
  return {t.const_data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
}

HeadsView<void*> output(const char* op, const char* name, const at::Tensor& t,
                        const at::Tensor& like) {
  check_heads(op, name, t, like);
  return {t.mutable_data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
}

// Sets what forward and backward share. x: [B, T, heads, D].
QkShape qk_shape(const char* op, const at::Tensor& x, std::string_view norm, double eps,
                 std::string_view rope, int64_t rotary_dim, const OptionalTensor& cos,
                 const OptionalTensor& sin) {
  TORCH_CHECK(x.dim() == 4, op, ": expected [B, T, heads, D], got ", x.sizes());
  const int64_t batch = x.size(0), head_dim = x.size(3);
  const at::ScalarType acc = acc_dtype(x.scalar_type());
  QkShape a{};
  a.dtype = kernel_dtype(op, "x", x);
  a.norm = norm_kind(op, norm);
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
  check_tensor(op, "cos", *cos, {batches, a.time, half}, acc, at::kCPU);
  check_tensor(op, "sin", *sin, {batches, a.time, half}, acc, at::kCPU);
  a.cos = cos->const_data_ptr();
  a.sin = sin->const_data_ptr();
  a.cos_batch_stride = batches == 1 ? 0 : a.time * half;
  return a;
}

void qk_fwd(const at::Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
            const OptionalTensor& cos, const OptionalTensor& sin, const at::Tensor& y,
            c10::string_view norm, double eps, c10::string_view rope, int64_t rotary_dim) {
  const char* op = "qk_fwd";
  QkFwd a{qk_shape(op, x, norm, eps, rope, rotary_dim, cos, sin)};
  const at::ScalarType acc = acc_dtype(x.scalar_type());
  at::Tensor gain, shift;
  if (a.norm != NormKind::none) {
    gain = norm_gain(op, "weight", weight, a.norm, a.head_dim, acc, at::kCPU);
    shift = norm_param(op, "bias", bias, a.head_dim, acc, at::kCPU);
    a.weight = gain.const_data_ptr();
    a.bias = const_data(shift);
  }
  a.x = input(op, "x", x, x);
  a.y = output(op, "y", y, x);
  parallel_rows(x.size(0) * a.time, a.heads * a.head_dim,
                [&](int64_t begin, int64_t end) { qk_fwd_rows(a, begin, end); });
}

void qk_bwd(const at::Tensor& dy, const at::Tensor& x, const OptionalTensor& weight,
            const OptionalTensor& cos, const OptionalTensor& sin, const at::Tensor& dx,
            const OptionalTensor& dw, const OptionalTensor& db, c10::string_view norm, double eps,
            c10::string_view rope, int64_t rotary_dim) {
  const char* op = "qk_bwd";
  QkBwd a{qk_shape(op, dy, norm, eps, rope, rotary_dim, cos, sin)};
  const at::ScalarType acc = acc_dtype(dy.scalar_type());
  at::Tensor gain;
  a.dy = input(op, "dy", dy, dy);
  a.dx = output(op, "dx", dx, dy);
  if (a.norm != NormKind::none) {
    gain = norm_gain(op, "weight", weight, a.norm, a.head_dim, acc, at::kCPU);
    a.weight = gain.const_data_ptr();
    a.x = input(op, "x", x, dy);
  }
  check_tensor(op, "dw", dw, {a.head_dim}, acc, at::kCPU);
  check_tensor(op, "db", db, {a.head_dim}, acc, at::kCPU);
  const int64_t tokens = dy.size(0) * a.time;
  const auto rows = [&](int64_t begin, int64_t end, void* dweight, void* dbias) {
    qk_bwd_rows(a, begin, end, dweight, dbias);
  };
  if (given(dw) || given(db)) {
    parallel_rows_with_grads(tokens, a.head_dim, acc, dw, db, rows);
  } else {
    parallel_rows(tokens, a.heads * a.head_dim, [&](int64_t begin, int64_t end) {
      qk_bwd_rows(a, begin, end, nullptr, nullptr);
    });
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(ckptfused, CPU, m) {
  m.impl("qk_fwd", &qk_fwd);
  m.impl("qk_bwd", &qk_bwd);
}

}  // namespace ckptfused
