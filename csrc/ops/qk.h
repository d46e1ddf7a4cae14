#pragma once

#include "kernels/qk.h"
#include "ops/row_args.h"

// The q/k norm and RoPE ops on any device: checks, then kRun with the kernel's struct. The rows of
// a call are tokens.

namespace ckptfused {

// What forward and backward share but for the norm's weight. x: [B, T, heads, D].
QkShape qk_shape(const char* op, const at::Tensor& x, std::string_view norm, double eps,
                 std::string_view rope, int64_t rotary_dim, const OptionalTensor& cos,
                 const OptionalTensor& sin);

// Tensors of the shape, dtype and device of `like`, whose heads are contiguous.
HeadsView<const void*> heads_input(const char* op, const char* name, const at::Tensor& t,
                                   const at::Tensor& like);
HeadsView<void*> heads_output(const char* op, const char* name, const at::Tensor& t,
                              const at::Tensor& like);

template <void (*kRun)(QkFwd, const RowCall&)>
void qk_fwd(const at::Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
            const OptionalTensor& cos, const OptionalTensor& sin, const at::Tensor& y,
            c10::string_view norm, double eps, c10::string_view rope, int64_t rotary_dim) {
  const char* op = "qk_fwd";
  QkFwd a{qk_shape(op, x, norm, eps, rope, rotary_dim, cos, sin)};
  if (a.norm != NormKind::none) {
    a.weight = norm_param(op, "weight", weight, a.head_dim, x.device());
    a.bias = norm_param(op, "bias", bias, a.head_dim, x.device());
  }
  a.x = heads_input(op, "x", x, x);
  a.y = heads_output(op, "y", y, x);
  kRun(a, {op, x.device(), x.size(0) * a.time});
}

template <void (*kRun)(QkBwd, const RowCall&)>
void qk_bwd(const at::Tensor& dy, const at::Tensor& x, const OptionalTensor& weight,
            const OptionalTensor& cos, const OptionalTensor& sin, const at::Tensor& dx,
            const OptionalTensor& dw, const OptionalTensor& db, c10::string_view norm, double eps,
            c10::string_view rope, int64_t rotary_dim) {
  const char* op = "qk_bwd";
  QkBwd a{qk_shape(op, dy, norm, eps, rope, rotary_dim, cos, sin)};
  const at::ScalarType acc = acc_dtype(dy.scalar_type());
  a.dy = heads_input(op, "dy", dy, dy);
  a.dx = heads_output(op, "dx", dx, dy);
  if (a.norm != NormKind::none) {
    a.weight = norm_param(op, "weight", weight, a.head_dim, dy.device());
    a.x = heads_input(op, "x", x, dy);
  }
  check_tensor(op, "dw", dw, {a.head_dim}, acc, dy.device());
  check_tensor(op, "db", db, {a.head_dim}, acc, dy.device());
  kRun(a, {op, dy.device(), dy.size(0) * a.time, {}, dw, db});
}

}  // namespace ckptfused
