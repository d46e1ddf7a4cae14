#include "ops/torch.h"

#include "kernels/cpu/activation.h"
#include "ops/row_args.h"

namespace ckptfused {
namespace {

// Sets what forward and backward share.
void set_activation(const char* op, std::string_view act, ActivationShape& a) {
  struct Name {
    std::string_view name;
    Activation act;
    bool gated;
  };
  static constexpr Name kNames[] = {
      {"relu", Activation::relu, false},           {"gelu", Activation::gelu, false},
      {"gelu_tanh", Activation::gelu_tanh, false}, {"silu", Activation::silu, false},
      {"relu2", Activation::relu2, false},         {"reglu", Activation::relu, true},
      {"geglu", Activation::gelu, true},           {"geglu_tanh", Activation::gelu_tanh, true},
      {"swiglu", Activation::silu, true},
  };
  for (const Name& known : kNames) {
    if (known.name != act) continue;
    a.act = known.act;
    a.gated = known.gated;
    return;
  }
  TORCH_CHECK(false, op, ": act: expected relu, gelu, gelu_tanh, silu, relu2, reglu, geglu, ",
              "geglu_tanh or swiglu, got ", act);
}

// The rows of a tensor that covers only part of the masked one are global rows row0 + i, so [B, T]
// need not multiply to n.
RowMap global_row_map(const char* op, at::IntArrayRef rows, int64_t row_end) {
  TORCH_CHECK(rows.empty() || (rows.size() == 2 && rows[0] * rows[1] >= row_end), op,
              ": rows: expected [] or [B, T] with B * T >= ", row_end, ", got ", rows);
  return rows.empty() ? RowMap{} : RowMap{rows[1], rows[0]};
}

ActivationShape activation_shape(const char* op, const at::Tensor& u, const OptionalTensor& state,
                                 std::string_view act, double p, int64_t site, int64_t cols,
                                 int64_t row0, int64_t col0, at::IntArrayRef rows) {
  TORCH_CHECK(u.dim() == 2 && row0 >= 0 && col0 >= 0 && col0 + u.size(1) <= cols, op,
              ": u: expected [n, f] with col0 + f <= cols = ", cols, ", got ", u.sizes(),
              " at row0 = ", row0, ", col0 = ", col0);
  ActivationShape a{};
  a.dtype = kernel_dtype(op, "u", u);
  set_activation(op, act, a);
  a.cols = u.size(1);
  a.row0 = row0;
  a.col0 = col0;
  a.rows = global_row_map(op, rows, row0 + u.size(0));
  a.dropout = host_dropout(op, state, p, site, cols);
  return a;
}

void check_slice(const char* op, const char* name, const at::Tensor& t, const at::Tensor& u) {
  TORCH_CHECK(t.sizes() == u.sizes() && t.scalar_type() == u.scalar_type() && t.is_cpu() &&
                  (t.size(1) <= 1 || t.stride(1) == 1),
              op, ": ", name, ": expected ", u.scalar_type(), " ", u.sizes(),
              " on cpu with contiguous rows, got ", t.scalar_type(), " ", t.sizes(), " strides ",
              t.strides(), " on ", t.device());
}

Strided<const void*> input(const char* op, const char* name, const at::Tensor& t,
                           const at::Tensor& u) {
  check_slice(op, name, t, u);
  return {t.const_data_ptr(), t.stride(0)};
}

Strided<void*> output(const char* op, const char* name, const OptionalTensor& t,
                      const at::Tensor& u) {
  if (!given(t)) return {};
  check_slice(op, name, *t, u);
  return {t->mutable_data_ptr(), t->stride(0)};
}

void activation_fwd(const at::Tensor& g, const at::Tensor& u, const OptionalTensor& rng_state,
                    const at::Tensor& h, c10::string_view act, double p, int64_t site, int64_t cols,
                    int64_t row0, int64_t col0, at::IntArrayRef rows) {
  const char* op = "activation_fwd";
  ActivationFwd a{activation_shape(op, u, rng_state, act, p, site, cols, row0, col0, rows)};
  a.u = input(op, "u", u, u);
  a.g = a.gated ? input(op, "g", g, u) : a.u;
  a.h = output(op, "h", h, u);
  parallel_rows(u.size(0), a.cols,
                [&](int64_t begin, int64_t end) { activation_fwd_rows(a, begin, end); });
}

void activation_bwd(const at::Tensor& g, const at::Tensor& u, const at::Tensor& dh,
                    const OptionalTensor& rng_state, const OptionalTensor& h,
                    const OptionalTensor& dg, const OptionalTensor& du, c10::string_view act,
                    double p, int64_t site, int64_t cols, int64_t row0, int64_t col0,
                    at::IntArrayRef rows) {
  const char* op = "activation_bwd";
  ActivationBwd a{activation_shape(op, u, rng_state, act, p, site, cols, row0, col0, rows)};
  TORCH_CHECK(a.gated || !given(dg), op, ": dg: expected none for ", act, ", which has no gate");
  a.u = input(op, "u", u, u);
  a.g = a.gated ? input(op, "g", g, u) : a.u;
  a.dh = input(op, "dh", dh, u);
  a.h = output(op, "h", h, u);
  a.dg = output(op, "dg", dg, u);
  a.du = output(op, "du", du, u);
  parallel_rows(u.size(0), a.cols,
                [&](int64_t begin, int64_t end) { activation_bwd_rows(a, begin, end); });
}

}  // namespace

TORCH_LIBRARY_IMPL(ckptfused, CPU, m) {
  m.impl("activation_fwd", &activation_fwd);
  m.impl("activation_bwd", &activation_bwd);
}

}  // namespace ckptfused
