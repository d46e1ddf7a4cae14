#pragma once

#include <cstdint>

#include "math/norm.h"
#include "math/types.h"

namespace ckptfused {

// What the norm kernels of every device take. Tensors are [N, C] and contiguous; "acc" is double
// where the rows are, else float. A dtype pair (r, p) is that of the residual stream and of the
// compute type: equal, or float32 rows beside a 16-bit p.

// A norm's weight or bias [C] in the dtype that the model holds it in. Null: a weight of ones, or
// no bias.
struct NormParam {
  const void* data = nullptr;
  DType dtype = DType::f32;
};

// y = norm(x). x: dtype r; y: dtype p.
struct NormFwd {
  NormKind kind;
  double eps;
  int64_t cols;
  DType r, p;
  const void* x;
  NormParam weight, bias;
  void* y;
};

// dx = (dres or 0) + J^T dy. x, dres, dx: dtype r; dy: dtype p; dx may be dres or dy.
struct NormBwd {
  NormKind kind;
  double eps;
  int64_t cols;
  DType r, p;
  const void* dy;
  const void* x;
  NormParam weight;
  const void* dres;  // or null
  void* dx;          // or null
};

// Columns of a row that a warp reads at once.
constexpr int64_t kWarpColumns = 256;

// In how many chunks of consecutive rows a GPU sums the gradients of a norm's parameters: as many
// blocks as fit at once, of at least eight rows each. A thread has two groups of a row and 128
// registers.
inline int64_t row_grad_chunks(int64_t rows, int64_t cols, int64_t multiprocessors) {
  const int64_t row_warps = (cols + kWarpColumns - 1) / kWarpColumns, warps = (row_warps + 1) / 2;
  const int64_t block = warps < 1 ? 1 : warps > 16 ? 16 : warps;
  const int64_t most = multiprocessors * (16 / block), wanted = (rows + 7) / 8;
  return wanted < 1 ? 1 : wanted < most ? wanted : most;
}

}  // namespace ckptfused
