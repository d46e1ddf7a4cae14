#pragma once

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#include "kernels/cpu/norm.h"
#include "kernels/cpu/rows.h"
#include "ops/checks.h"

// How ops on rows turn their arguments into what the kernels take, and run them in parallel.

namespace ckptfused {

inline NormKind norm_kind(const char* op, std::string_view kind) {
  if (kind == "none") return NormKind::none;
  if (kind == "layernorm") return NormKind::layernorm;
  if (kind == "rmsnorm") return NormKind::rmsnorm;
  TORCH_CHECK(kind == "gemma", op, ": expected a norm of none, layernorm, rmsnorm or gemma, got ",
              kind);
  return NormKind::gemma;
}

// A norm's weight or bias [cols] in the accumulation type; undefined if absent.
inline at::Tensor norm_param(const char* op, const char* name, const OptionalTensor& param,
                             int64_t cols, at::ScalarType acc, at::Device device) {
  if (!given(param)) return {};
  TORCH_CHECK(param->sizes() == at::IntArrayRef({cols}) && param->device() == device, op, ": ",
              name, ": expected [", cols, "] on ", device, ", got ", param->sizes(), " on ",
              param->device());
  return param->to(acc).contiguous();
}

// What xhat is multiplied by, [cols] in the accumulation type: the weight, 1 + weight for Gemma's
// norm, ones if there is none.
inline at::Tensor norm_gain(const char* op, const char* name, const OptionalTensor& weight,
                            NormKind kind, int64_t cols, at::ScalarType acc, at::Device device) {
  const at::Tensor gain = norm_param(op, name, weight, cols, acc, device);
  if (!gain.defined()) return at::ones({cols}, at::TensorOptions().dtype(acc).device(device));
  return kind == NormKind::gemma ? gain + 1 : gain;
}

// rows: [] for batch-first rows, or [B, T] for rows of a [T, B, C] tensor.
inline RowMap row_map(const char* op, at::IntArrayRef rows, int64_t n) {
  RowMap map;
  if (rows.empty()) return map;
  TORCH_CHECK(rows.size() == 2 && rows[0] * rows[1] == n, op, ": rows: expected [] or [B, T] with ",
              "B * T = ", n, ", got ", rows);
  map.outer = rows[1];
  map.inner = rows[0];
  return map;
}

// The dropout of a tensor whose last dimension has cols entries; state is on the host.
inline Dropout host_dropout(const char* op, const OptionalTensor& state, double p, int64_t site,
                            int64_t cols) {
  check_probability(op, p);
  if (p == 0.0) return {};
  check_rng_state(op, state, at::kCPU);
  return make_dropout(state->const_data_ptr<int64_t>(), p, int(site), cols);
}

// Calls rows(begin, end) over [0, n) in parallel.
template <typename Rows>
void parallel_rows(int64_t n, int64_t cols, Rows rows) {
  constexpr int64_t kElements = 32768;  // per task at least
  at::parallel_for(0, n, std::max<int64_t>(1, kElements / std::max<int64_t>(1, cols)), rows);
}

// Calls rows(begin, end, dweight, dbias) over [0, n) in parallel, where each call adds to [cols]
// buffers of its own, and overwrites dweight and dbias with their sum. Either may be absent; the
// sum's order depends on n alone.
template <typename Rows>
void parallel_rows_with_grads(int64_t n, int64_t cols, at::ScalarType acc,
                              const OptionalTensor& dweight, const OptionalTensor& dbias,
                              Rows rows) {
  if (!given(dweight) && !given(dbias)) {
    parallel_rows(n, cols, [&](int64_t begin, int64_t end) { rows(begin, end, nullptr, nullptr); });
    return;
  }
  const RowChunks chunks(n);
  const int64_t bytes = cols * int64_t(c10::elementSize(acc));
  const auto make_partials = [&](const OptionalTensor& grad) {
    return given(grad) ? at::empty({chunks.count(), cols}, grad->options()) : at::Tensor();
  };
  const at::Tensor dweight_partials = make_partials(dweight), dbias_partials = make_partials(dbias);
  at::parallel_for(0, chunks.count(), 1, [&](int64_t chunk_begin, int64_t chunk_end) {
    for (int64_t chunk = chunk_begin; chunk < chunk_end; ++chunk) {
      const auto zeroed = [&](const at::Tensor& partials) -> void* {
        if (!partials.defined()) return nullptr;
        void* partial = static_cast<char*>(partials.mutable_data_ptr()) + chunk * bytes;
        return std::memset(partial, 0, size_t(bytes));
      };
      rows(chunks.begin(chunk), chunks.end(chunk), zeroed(dweight_partials),
           zeroed(dbias_partials));
    }
  });
  for (const auto& [partials, grad] :
       {std::pair(dweight_partials, dweight), std::pair(dbias_partials, dbias)}) {
    if (!partials.defined()) continue;
    at::parallel_for(0, cols, 512,
                     [&, from = partials.const_data_ptr(), to = grad->mutable_data_ptr()](
                         int64_t begin, int64_t end) {
                       sum_partials(acc == at::kDouble, from, chunks.count(), cols, to, begin, end);
                     });
  }
}

}  // namespace ckptfused
