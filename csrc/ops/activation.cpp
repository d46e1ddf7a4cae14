#include "ops/torch.h"

#include "ops/activation.h"

namespace ckptfused {
namespace {

constexpr int64_t kCoefficients = 4;

const NamedActivation& checked_activation(const char* op, std::string_view act) {
  const NamedActivation* found = find_activation(act);
  if (found != nullptr) return *found;
  std::string names;
  for (const NamedActivation& known : kActivations) {
    names += (names.empty() ? "" : ", ") + std::string(known.name);
  }
  TORCH_CHECK(false, op, ": act: expected one of ", names, ", got ", act);
}

// The rows of a tensor that covers only part of the masked one are global rows row0 + i, so [B, T]
// need not multiply to n.
RowMap global_row_map(const char* op, at::IntArrayRef rows, int64_t row_end) {
  const auto fits = [&] {
    const int64_t first = rows.size() == 3 ? rows[2] : 0;
    return (rows.size() == 2 || rows.size() == 3) && first >= 0 &&
           rows[0] * rows[1] >= first + row_end;
  };
  TORCH_CHECK(rows.empty() || fits(), op,
              ": rows: expected [], [B, T] or [B, T, first] with B * T >= first + ", row_end,
              ", got ", rows);
  return row_map(rows);
}

void check_slice(const char* op, const char* name, const at::Tensor& t, const at::Tensor& u) {
  TORCH_CHECK(t.sizes() == u.sizes() && t.scalar_type() == u.scalar_type() &&
                  t.device() == u.device() && (t.size(1) <= 1 || t.stride(1) == 1),
              op, ": ", name, ": expected ", u.scalar_type(), " ", u.sizes(), " on ", u.device(),
              " with contiguous rows, got ", t.scalar_type(), " ", t.sizes(), " strides ",
              t.strides(), " on ", t.device());
  check_memory(op, name, t);
}

}  // namespace

ActivationShape activation_shape(const char* op, const at::Tensor& u, const OptionalTensor& state,
                                 std::string_view act, double p, int64_t site, int64_t cols,
                                 int64_t row0, int64_t col0, at::IntArrayRef rows,
                                 const OptionalTensor& coefficients) {
  TORCH_CHECK(u.dim() == 2 && row0 >= 0 && col0 >= 0 && col0 + u.size(1) <= cols, op,
              ": u: expected [n, f] with col0 + f <= cols = ", cols, ", got ", u.sizes(),
              " at row0 = ", row0, ", col0 = ", col0);
  ActivationShape a{};
  a.dtype = kernel_dtype(op, "u", u);
  const bool kept = act == kKept;
  const NamedActivation& named = checked_activation(op, kept ? "reglu" : act);
  a.act = named.act;
  a.gated = named.gated;
  a.cols = u.size(1);
  a.row0 = row0;
  a.col0 = col0;
  a.rows = global_row_map(op, rows, row0 + u.size(0));
  a.dropout = checked_dropout(op, state, p, site, cols, u.device());
  if (kept) a.dropout.scale = 1;
  const bool has_coefficients = a.act == Activation::xielu;
  TORCH_CHECK(given(coefficients) == has_coefficients, op, ": coefficients: expected ",
              has_coefficients ? "[4] for " : "none for ", act);
  if (has_coefficients) {
    check_tensor(op, "coefficients", *coefficients, {kCoefficients}, acc_dtype(u.scalar_type()),
                 u.device());
    a.coefficients = coefficients->const_data_ptr();
  }
  return a;
}

void* coefficient_sums_output(const char* op, const OptionalTensor& sums, const at::Tensor& u,
                              const ActivationShape& a) {
  if (!given(sums)) return nullptr;
  TORCH_CHECK(a.act == Activation::xielu, op, ": sums: expected none without coefficients");
  check_tensor(op, "sums", *sums, {coefficient_sums(u.size(0), a.cols), kCoefficients},
               acc_dtype(u.scalar_type()), u.device());
  return sums->mutable_data_ptr();
}

Strided<const void*> activation_input(const char* op, const char* name, const at::Tensor& t,
                                      const at::Tensor& u) {
  check_slice(op, name, t, u);
  return {t.const_data_ptr(), t.stride(0)};
}

Strided<void*> activation_output(const char* op, const char* name, const OptionalTensor& t,
                                 const at::Tensor& u) {
  if (!given(t)) return {};
  check_slice(op, name, *t, u);
  return {t->mutable_data_ptr(), t->stride(0)};
}

}  // namespace ckptfused
