#pragma once

#include <string_view>

#include "kernels/norm.h"
#include "math/dropout.h"
#include "ops/checks.h"
#include "ops/ledger.h"

// How ops on rows turn their arguments into what the kernels of every device take. <stem>.h checks
// the arguments and fills the kernel's struct, <stem>_cpu.cpp and <stem>_cuda.cpp run it.

namespace ckptfused {

// What a device needs to know of a call, beside the kernel's struct.
struct RowCall {
  const char* op;
  at::Device device;
  int64_t rows;
  OptionalTensor rng_state{};  // (seed, offset); there where the dropout is active
  // Of a norm's parameters the gradients of each chunk of rows: [chunks, cols] acc, or absent.
  OptionalTensor dweight{}, dbias{};

  // The state as kernels take it, on the device; null where nothing is dropped.
  const int64_t* state(const Dropout& dropout) const {
    return dropout.active() ? rng_state->const_data_ptr<int64_t>() : nullptr;
  }
  // otherwise: where no gradient is asked for.
  int64_t chunks(int64_t otherwise) const {
    return given(dweight) ? dweight->size(0) : given(dbias) ? dbias->size(0) : otherwise;
  }
};

// Where the gradients of a norm's parameters go, a sum over each of as many runs of consecutive
// rows as they have rows themselves.
inline void check_grads(const char* op, const char* dw_name, const OptionalTensor& dw,
                        const char* db_name, const OptionalTensor& db, int64_t cols,
                        at::ScalarType acc, at::Device device) {
  const auto check = [&](const char* name, const OptionalTensor& grad, int64_t chunks) {
    check_tensor(op, name, grad, {chunks, cols}, acc, device);
  };
  const auto chunks = [](const OptionalTensor& grad) {
    return given(grad) && grad->dim() == 2 ? grad->size(0) : int64_t(1);
  };
  check(dw_name, dw, chunks(dw));
  check(db_name, db, chunks(given(dw) ? dw : db));
}

inline NormKind norm_kind(const char* op, std::string_view kind) {
  if (kind == "none") return NormKind::none;
  if (kind == "layernorm") return NormKind::layernorm;
  if (kind == "rmsnorm") return NormKind::rmsnorm;
  if (kind == "gemma") return NormKind::gemma;
  if (kind == "layernorm1p") return NormKind::layernorm1p;
  TORCH_CHECK(
      kind == "layerscale", op,
      ": expected a norm of none, layernorm, rmsnorm, gemma, layernorm1p or layerscale, got ",
      kind);
  return NormKind::layerscale;
}

// A norm's weight or bias [cols] as the model holds it.
inline NormParam norm_param(const char* op, const char* name, const OptionalTensor& param,
                            int64_t cols, at::Device device) {
  if (!given(param)) return {};
  check_tensor(op, name, *param, {cols}, param->scalar_type(), device);
  return {param->const_data_ptr(), kernel_dtype(op, name, *param)};
}

// rows: [] for batch-first rows, [B, T] for rows of a [T, B, C] tensor, or [B, T, first] for those
// of it from the first on (B = 1: of a batch-first one).
inline RowMap row_map(at::IntArrayRef rows) {
  if (rows.empty()) return {};
  return {rows[1], rows[0], rows.size() > 2 ? rows[2] : 0};
}

// Likewise of all n rows of such a tensor, or of n from the first on.
inline RowMap row_map(const char* op, at::IntArrayRef rows, int64_t n) {
  const bool fits = rows.empty() || (rows.size() == 2 && rows[0] * rows[1] == n) ||
                    (rows.size() == 3 && rows[2] >= 0 && rows[2] + n <= rows[0] * rows[1]);
  TORCH_CHECK(fits, op, ": rows: expected [] or [B, T] with B * T = ", n,
              ", or [B, T, first] with first + ", n, " of at most B * T, got ", rows);
  return row_map(rows);
}

// The dropout of a tensor whose last dimension has cols entries, without the state of its call.
inline Dropout checked_dropout(const char* op, const OptionalTensor& state, double p, int64_t site,
                               int64_t cols, at::Device device) {
  check_probability(op, p);
  TORCH_CHECK(0 <= site && site < kDropoutSites, op, ": site: expected 0 to ", kDropoutSites - 1,
              ", got ", site);
  if (p == 0.0) return {};
  check_rng_state(op, state, device);
  return make_dropout(p, int(site), cols);
}

// Likewise with the state, which is on the host.
inline Dropout host_dropout(const char* op, const OptionalTensor& state, double p, int64_t site,
                            int64_t cols) {
  const Dropout dropout = checked_dropout(op, state, p, site, cols, host());
  if (counting() || !dropout.active()) return dropout;
  return with_state(dropout, state->const_data_ptr<int64_t>());
}

}  // namespace ckptfused
