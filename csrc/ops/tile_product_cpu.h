#pragma once

#include "ops/torch.h"

#include "kernels/cpu/operands.h"
#include "math/types.h"

// Products of one tile of attention, on the thread that calls them, of operands laid out as
// kernels/cpu/operands.h says.

namespace ckptfused::tiles {

// Whether tiles of bfloat16 are multiplied as they are, with sums in float32. Those of float16, and
// of bfloat16 on a processor that takes longer for it, are converted to float32.
bool multiplies_bfloat16();

// Products of so few multiplications, and in float, are loops of our own: the call of a library
// alone takes longer. A function of the tile's shape, so that a replay has forward's bits.
constexpr int64_t kSmallProduct = int64_t(1) << 10;

// out [rows, cols] = left [rows, depth] @ right [depth, cols], or added to it. Entries of a row of
// right lie side by side; depth is a multiple of kRowsAbreast.
void multiply(int64_t rows, int64_t cols, int64_t depth, const bf16* left, int64_t left_stride,
              const bf16* right, int64_t right_stride, float* out, int64_t out_stride, bool add);
void multiply(int64_t rows, int64_t cols, int64_t depth, const float* left, int64_t left_stride,
              const float* right, int64_t right_stride, float* out, int64_t out_stride, bool add);
void multiply(int64_t rows, int64_t cols, int64_t depth, const double* left, int64_t left_stride,
              const double* right, int64_t right_stride, double* out, int64_t out_stride, bool add);

// After a task's last product: gives back the state that the processor's tiles hold on a thread.
template <typename C>
void end_products();

}  // namespace ckptfused::tiles
