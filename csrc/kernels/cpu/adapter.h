#pragma once

#include <cstdint>

#include "math/dropout.h"
#include "math/types.h"

namespace ckptfused {

// A block of rows of a tensor that an adapter reads or adds to, and where it lies in the tensor
// that the adapter's dropout applies to: its first row is row0 (before row_map), its first column
// col0.
struct AdapterBlock {
  int64_t rows, cols;
  Dropout dropout{};
  RowMap row_map{};
  int64_t row0 = 0, col0 = 0;
};

// out[i, c] = drop(in[i, c]) in the accumulation type. in has rows `stride` apart, out is
// contiguous.
template <typename T>
void adapter_load_rows(const AdapterBlock& a, const T* in, int64_t stride, acc_t<T>* out);

// out[i, c] += drop(in[i, c]), added in the accumulation type and rounded once. in is contiguous,
// out has rows `stride` apart.
template <typename T>
void adapter_add_rows(const AdapterBlock& a, const acc_t<T>* in, T* out, int64_t stride);

// sums[c] += scale * (the sum of in[i, c] over the rows). in is contiguous.
template <typename A>
void adapter_sum_rows(int64_t rows, int64_t cols, const A* in, A scale, A* sums);

// out[i] += partials[0][i] + partials[1][i] + ... for i in [0, n), the partials `stride` apart.
template <typename A>
void adapter_add_partials(const A* partials, int64_t count, int64_t stride, int64_t n, A* out);

}  // namespace ckptfused
