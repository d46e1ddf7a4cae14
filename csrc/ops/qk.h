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

// Raises unless heads of another kind have the type, tokens and width of those of `like`.
void check_same_tokens(const char* op, const char* name, const at::Tensor& t,
                       const at::Tensor& like);

// Tensors of the shape, dtype and device of `like`, whose heads are contiguous.
HeadsView<const void*> heads_input(const char* op, const char* name, const at::Tensor& t,
                                   const at::Tensor& like);
HeadsView<void*> heads_output(const char* op, const char* name, const at::Tensor& t,
                              const at::Tensor& like);

// Heads of one kind, q's, k's or v's, of the tokens of a call.
template <typename Heads>
struct QkPart {
  Heads heads;
  RowCall call;
};
template <typename Heads>
using QkPartList = c10::SmallVector<QkPart<Heads>, 3>;

// y = rope(norm(x)) and, where they are given, the same of k with a norm of its own.
template <void (*kRun)(const QkPartList<QkFwd>&)>
void qk_fwd(const at::Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
            const OptionalTensor& cos, const OptionalTensor& sin, const at::Tensor& y,
            c10::string_view norm, double eps, c10::string_view rope, int64_t rotary_dim,
            const OptionalTensor& k, const OptionalTensor& k_weight, const OptionalTensor& k_bias,
            const OptionalTensor& k_out) {
  const char* op = "qk_fwd";
  QkPartList<QkFwd> parts;
  // names: of from, w, b and to
  const auto add = [&](const char* const(&names)[4], const at::Tensor& from,
                       const OptionalTensor& w, const OptionalTensor& b, const at::Tensor& to) {
    QkFwd a{qk_shape(op, from, norm, eps, rope, rotary_dim, cos, sin)};
    if (a.norm != NormKind::none) {
      a.weight = norm_param(op, names[1], w, a.head_dim, x.device());
      a.bias = norm_param(op, names[2], b, a.head_dim, x.device());
    }
    a.x = heads_input(op, names[0], from, from);
    a.y = heads_output(op, names[3], to, from);
    parts.push_back({a, {op, x.device(), x.size(0) * a.time}});
  };
  add({"x", "weight", "bias", "y"}, x, weight, bias, y);
  if (given(k)) {
    check_same_tokens(op, "k", *k, x);
    TORCH_CHECK(given(k_out), op, ": k_out: expected where k is given");
    add({"k", "k_weight", "k_bias", "k_out"}, *k, k_weight, k_bias, *k_out);
  }
  kRun(parts);
}

// The gradients of qk_fwd's inputs and, where they are given, those of v, which are copied.
template <void (*kRun)(const QkPartList<QkBwd>&)>
void qk_bwd(const at::Tensor& dy, const at::Tensor& x, const OptionalTensor& weight,
            const OptionalTensor& cos, const OptionalTensor& sin, const at::Tensor& dx,
            const OptionalTensor& dw, const OptionalTensor& db, c10::string_view norm, double eps,
            c10::string_view rope, int64_t rotary_dim, const OptionalTensor& dk,
            const OptionalTensor& k, const OptionalTensor& k_weight, const OptionalTensor& dk_out,
            const OptionalTensor& dk_w, const OptionalTensor& dk_b, const OptionalTensor& dv,
            const OptionalTensor& dv_out) {
  const char* op = "qk_bwd";
  const at::ScalarType acc = acc_dtype(dy.scalar_type());
  QkPartList<QkBwd> parts;
  // names: of from, heads, w, to, grad_w and grad_b
  const auto add = [&](const char* const(&names)[6], QkBwd a, const at::Tensor& from,
                       const OptionalTensor& heads, const OptionalTensor& w, const at::Tensor& to,
                       const OptionalTensor& grad_w, const OptionalTensor& grad_b) {
    a.dy = heads_input(op, names[0], from, from);
    a.dx = heads_output(op, names[3], to, from);
    if (a.norm != NormKind::none) {
      TORCH_CHECK(given(heads), op, ": ", names[1], ": expected the norm's input, got none");
      a.weight = norm_param(op, names[2], w, a.head_dim, dy.device());
      a.x = heads_input(op, names[1], *heads, from);
    }
    check_grads(op, names[4], grad_w, names[5], grad_b, a.head_dim, acc, dy.device());
    parts.push_back({a, {op, dy.device(), dy.size(0) * a.time, {}, grad_w, grad_b}});
  };
  add({"dy", "x", "weight", "dx", "dw", "db"},
      {qk_shape(op, dy, norm, eps, rope, rotary_dim, cos, sin)}, dy, x, weight, dx, dw, db);
  if (given(dk)) {
    check_same_tokens(op, "dk", *dk, dy);
    TORCH_CHECK(given(dk_out), op, ": dk_out: expected where dk is given");
    add({"dk", "k", "k_weight", "dk_out", "dk_w", "dk_b"},
        {qk_shape(op, *dk, norm, eps, rope, rotary_dim, cos, sin)}, *dk, k, k_weight, *dk_out, dk_w,
        dk_b);
  }
  if (given(dv)) {
    check_same_tokens(op, "dv", *dv, dy);
    TORCH_CHECK(given(dv_out), op, ": dv_out: expected where dv is given");
    add({"dv", "", "", "dv_out", "", ""}, {qk_shape(op, *dv, "none", eps, "none", 0, {}, {})}, *dv,
        {}, {}, *dv_out, {}, {});
  }
  kRun(parts);
}

}  // namespace ckptfused
