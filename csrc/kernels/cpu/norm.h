#pragma once

#include <cstdint>

#include "math/norm.h"
#include "math/types.h"

namespace ckptfused {

// Rows [begin, end) of an [N, C] tensor. "acc" buffers hold double if the rows do, else float. A
// dtype pair is one of for_row_types (rows.h); both functions return false for any other.

// y = norm(x). x: dtype r; y: dtype p; weight, bias [C] acc.
struct NormFwd {
  NormKind kind;
  double eps;
  int64_t cols;
  DType r, p;
  const void* x;
  const void* weight;
  const void* bias;  // or null
  void* y;
};
bool norm_fwd_rows(const NormFwd& a, int64_t begin, int64_t end);

// dx = (dres or 0) + J^T dy. x, dres, dx: dtype r; dy: dtype p; dx may be dres or dy. The weight's
// and bias's gradients are added to dweight and dbias, [C] acc.
struct NormBwd {
  NormKind kind;
  double eps;
  int64_t cols;
  DType r, p;
  const void* dy;
  const void* x;
  const void* weight;
  const void* dres;  // or null
  void* dx;          // or null
};
bool norm_bwd_rows(const NormBwd& a, int64_t begin, int64_t end, void* dweight, void* dbias);

// out[c] = partials[0][c] + partials[1][c] + ... for c in [begin, end); partials [count, cols] and
// out [cols] are acc, double if wide.
void sum_partials(bool wide, const void* partials, int64_t count, int64_t cols, void* out,
                  int64_t begin, int64_t end);

}  // namespace ckptfused
