#pragma once

#include "ops/torch.h"

#include <optional>
#include <string>
#include <string_view>

#include "ops/counted.h"

namespace ckptfused {

// The optional parameters or inputs of a block call, in the order of their slots.
using OptTensorList = c10::List<std::optional<at::Tensor>>;

}  // namespace ckptfused

// The small ops, called by name through the dispatcher, so that CPU, CUDA and Triton kernels are
// interchangeable; while a ledger is open, their counted forms. Undefined tensors become None.
namespace ckptfused::call {

using at::Tensor;
using OptTensor = std::optional<at::Tensor>;

inline OptTensor opt(const Tensor& t) {
  return t.defined() ? OptTensor(t) : OptTensor();
}

template <typename Signature>
c10::TypedOperatorHandle<Signature> found(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// op: the op of that name, whose signature its counted form has.
#define CKPT_OP(name)                                                               \
  static const auto handle =                                                        \
      found<std::remove_pointer_t<decltype(&*counted::name)>>("ckptfused::" #name); \
  const auto op = [](const auto&... arguments) {                                    \
    if (!counting()) return handle.call(arguments...);                              \
    const Ledger::Given given(arguments...);                                        \
    return counted::name(arguments...);                                             \
  }

inline Tensor rng_state(const Tensor& like, int64_t call_id,
                        const std::optional<at::Generator>& generator) {
  static const auto op = found<Tensor(const Tensor&, int64_t, const std::optional<at::Generator>&)>(
      "ckptfused::rng_state");
  return op.call(like, call_id, generator);
}

// While a ledger is open it does on meta tensors what it would do there.
inline Tensor dequantize(const Tensor& codes, const OptTensorList& state, std::string_view form,
                         at::IntArrayRef sizes, at::ScalarType dtype, int64_t first = 0) {
  static const auto op =
      found<Tensor(const Tensor&, const OptTensorList&, std::string_view, at::IntArrayRef,
                   at::ScalarType, int64_t)>("ckptfused::dequantize");
  return op.call(codes, state, form, sizes, dtype, first);
}

inline void norm_fwd(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& y,
                     std::string_view kind, double eps) {
  CKPT_OP(norm_fwd);
  op(x, opt(weight), opt(bias), y, kind, eps);
}

inline void norm_bwd(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& dres,
                     const Tensor& dx, const Tensor& dw, const Tensor& db, std::string_view kind,
                     double eps) {
  CKPT_OP(norm_bwd);
  op(dy, x, opt(weight), opt(dres), opt(dx), opt(dw), opt(db), kind, eps);
}

// In how many chunks of rows, or of the heads of each row, an op leaves a norm's gradients.
inline int64_t grad_chunks(const Tensor& like, int64_t rows, int64_t cols, int64_t heads) {
  CKPT_OP(grad_chunks);
  return op(like, rows, cols, heads);
}

// grads[i] = the sum over chunks of partials[i].
inline void sum_grads(const std::vector<Tensor>& partials, const std::vector<Tensor>& grads) {
  CKPT_OP(sum_grads);
  op(at::TensorList(partials), at::TensorList(grads));
}

inline void residual_fwd(const Tensor& x, const Tensor& f, const Tensor& rng, const Tensor& post_w,
                         const Tensor& post_b, const Tensor& next_w, const Tensor& next_b,
                         const Tensor& sum, const Tensor& normed, std::string_view post,
                         double post_eps, std::string_view next, double next_eps, double m,
                         double p, int64_t site, at::IntArrayRef rows) {
  CKPT_OP(residual_fwd);
  op(x, f, opt(rng), opt(post_w), opt(post_b), opt(next_w), opt(next_b), opt(sum), opt(normed),
     post, post_eps, next, next_eps, m, p, site, rows);
}

inline void residual_bwd(const Tensor& ds, const Tensor& f, const Tensor& rng, const Tensor& post_w,
                         const Tensor& df, const Tensor& dpost_w, const Tensor& dpost_b,
                         std::string_view post, double post_eps, double m, double p, int64_t site,
                         at::IntArrayRef rows) {
  CKPT_OP(residual_bwd);
  op(ds, opt(f), opt(rng), opt(post_w), df, opt(dpost_w), opt(dpost_b), post, post_eps, m, p, site,
     rows);
}

inline void activation_fwd(const Tensor& g, const Tensor& u, const Tensor& rng, const Tensor& h,
                           std::string_view act, double p, int64_t site, int64_t cols, int64_t row0,
                           int64_t col0, at::IntArrayRef rows, const Tensor& coefficients = {}) {
  CKPT_OP(activation_fwd);
  op(g, u, opt(rng), h, act, p, site, cols, row0, col0, rows, opt(coefficients));
}

inline void activation_bwd(const Tensor& g, const Tensor& u, const Tensor& dh, const Tensor& rng,
                           const Tensor& h, const Tensor& dg, const Tensor& du,
                           std::string_view act, double p, int64_t site, int64_t cols, int64_t row0,
                           int64_t col0, at::IntArrayRef rows, const Tensor& coefficients = {},
                           const Tensor& sums = {}) {
  CKPT_OP(activation_bwd);
  op(g, u, dh, opt(rng), opt(h), opt(dg), opt(du), act, p, site, cols, row0, col0, rows,
     opt(coefficients), opt(sums));
}

// The platform's products where no kernel of ours is registered for the device. Python is asked
// once for a shape, until forget_ffn_choices.
std::string ffn_choice(const Tensor& like, at::ScalarType dtype, int64_t n, int64_t c, int64_t f,
                       std::string_view act);
void forget_ffn_choices();

// The gate and up projections of some hidden columns; those that do not exist are undefined.
struct UpWeights {
  Tensor gate, gate_bias, up, up_bias;
};

// Where the mask of a tile lies in that of the hidden tensor.
struct HiddenMask {
  Tensor rng;
  double p;
  int64_t site, cols, row0, col0;
  at::IntArrayRef rows;
};

inline void ffn_up_fwd(const Tensor& x, const UpWeights& w, const Tensor& h, const Tensor& g,
                       const Tensor& u, std::string_view act, bool transposed,
                       const HiddenMask& mask, std::string_view config) {
  CKPT_OP(ffn_up_fwd);
  op(x, opt(w.gate), w.up, opt(w.gate_bias), opt(w.up_bias), opt(mask.rng), h, opt(g), opt(u), act,
     transposed, mask.p, mask.site, mask.cols, mask.row0, mask.col0, mask.rows, config);
}

inline void ffn_up_bwd(const Tensor& x, const UpWeights& w, const Tensor& g, const Tensor& u,
                       const Tensor& ddown, const Tensor& down_w, const Tensor& h, const Tensor& dg,
                       const Tensor& du, std::string_view act, bool transposed,
                       const HiddenMask& mask, std::string_view config) {
  CKPT_OP(ffn_up_bwd);
  op(opt(x), opt(w.gate), opt(w.up), opt(w.gate_bias), opt(w.up_bias), opt(g), opt(u), ddown,
     down_w, opt(mask.rng), opt(h), opt(dg), opt(du), act, transposed, mask.p, mask.site, mask.cols,
     mask.row0, mask.col0, mask.rows, config);
}

// Norm and rotation of heads [B, T, heads, D].
struct QkArgs {
  Tensor cos, sin;
  std::string_view norm;
  double eps;
  std::string_view rope;
  int64_t rotary_dim;
};
struct QkHeads {
  Tensor from, to, weight, bias;
};

// k: undefined where q's are all heads.
inline void qk_fwd(const QkHeads& q, const QkHeads& k, const QkArgs& a) {
  CKPT_OP(qk_fwd);
  op(q.from, opt(q.weight), opt(q.bias), opt(a.cos), opt(a.sin), q.to, a.norm, a.eps, a.rope,
     a.rotary_dim, opt(k.from), opt(k.weight), opt(k.bias), opt(k.to));
}

// raw: what was normalised; dw and db: the sums of each chunk; undefined where there is no norm.
struct QkGradHeads {
  Tensor from, raw, to, weight, dw, db;
};

inline void qk_bwd(const QkGradHeads& q, const QkGradHeads& k, const Tensor& dv,
                   const Tensor& dv_to, const QkArgs& a) {
  CKPT_OP(qk_bwd);
  // Without a norm the kernel reads no x; the gradient stands in for it.
  op(q.from, q.raw.defined() ? q.raw : q.from, opt(q.weight), opt(a.cos), opt(a.sin), q.to,
     opt(q.dw), opt(q.db), a.norm, a.eps, a.rope, a.rotary_dim, opt(k.from), opt(k.raw),
     opt(k.weight), opt(k.to), opt(k.dw), opt(k.db), opt(dv), opt(dv_to));
}

// How a loss is made of logits.
struct LossArgs {
  int64_t ignore_index;
  double smoothing, scale, softcap, z_loss;
};

inline void cross_entropy_fwd(const Tensor& logits, const Tensor& target,
                              const Tensor& class_weight, const Tensor& loss, const Tensor& lse,
                              const Tensor& predicted, bool grad, const LossArgs& a) {
  CKPT_OP(cross_entropy_fwd);
  op(logits, target, opt(class_weight), loss, lse, opt(predicted), grad, a.ignore_index,
     a.smoothing, a.scale, a.softcap, a.z_loss);
}

inline void cross_entropy_bwd(const Tensor& logits, const Tensor& target,
                              const Tensor& class_weight, const Tensor& lse, const Tensor& factor,
                              int64_t classes, int64_t col0, const LossArgs& a) {
  CKPT_OP(cross_entropy_bwd);
  op(logits, target, opt(class_weight), lse, opt(factor), classes, col0, a.ignore_index,
     a.smoothing, a.scale, a.softcap, a.z_loss);
}

// How a query sees the keys: what attention_fwd and attention_bwd share.
struct AttentionArgs {
  Tensor mask, padding, cu_seqlens, rng;
  std::string_view mask_kind, padding_kind;
  double scale;
  bool causal;
  int64_t window;
  double softcap, p;
};

inline std::tuple<Tensor, Tensor> attention_fwd(const Tensor& q, const Tensor& k, const Tensor& v,
                                                const AttentionArgs& a) {
  CKPT_OP(attention_fwd);
  return op(q, k, v, opt(a.mask), opt(a.padding), opt(a.cu_seqlens), opt(a.rng), a.mask_kind,
            a.padding_kind, a.scale, a.causal, a.window, a.softcap, a.p);
}

inline std::tuple<Tensor, Tensor, Tensor> attention_bwd(const Tensor& d_o, const Tensor& q,
                                                        const Tensor& k, const Tensor& v,
                                                        const Tensor& o, const Tensor& lse,
                                                        const AttentionArgs& a) {
  CKPT_OP(attention_bwd);
  return op(d_o, q, k, v, o, lse, opt(a.mask), opt(a.padding), opt(a.cu_seqlens), opt(a.rng),
            a.mask_kind, a.padding_kind, a.scale, a.causal, a.window, a.softcap, a.p);
}

// A tile of the queries; k and v are of all keys. backward adds to dk and dv, returns dq.
inline std::tuple<Tensor, Tensor> attention_tile_fwd(const Tensor& q, const Tensor& k,
                                                     const Tensor& v, const AttentionArgs& a,
                                                     at::IntArrayRef tile) {
  CKPT_OP(attention_tile_fwd);
  return op(q, k, v, opt(a.mask), opt(a.padding), opt(a.cu_seqlens), opt(a.rng), a.mask_kind,
            a.padding_kind, a.scale, a.causal, a.window, a.softcap, a.p, tile);
}

inline Tensor attention_tile_bwd(const Tensor& d_o, const Tensor& q, const Tensor& k,
                                 const Tensor& v, const Tensor& o, const Tensor& lse,
                                 const Tensor& dk, const Tensor& dv, const AttentionArgs& a,
                                 at::IntArrayRef tile) {
  CKPT_OP(attention_tile_bwd);
  return op(d_o, q, k, v, o, lse, dk, dv, opt(a.mask), opt(a.padding), opt(a.cu_seqlens),
            opt(a.rng), a.mask_kind, a.padding_kind, a.scale, a.causal, a.window, a.softcap, a.p,
            tile);
}

#undef CKPT_OP

}  // namespace ckptfused::call
