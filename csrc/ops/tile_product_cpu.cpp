#include "ops/tile_product_cpu.h"

#include <ATen/native/CPUBlas.h>

#include "kernels/cpu/attention.h"
#include "ops/linear.h"
#include "ops/tasks_cpu.h"

namespace ckptfused::tiles {
namespace {

namespace blas = at::native::cpublas;

template <typename A>
bool small_multiply(int64_t rows, int64_t cols, int64_t depth, const A* left, int64_t left_stride,
                    const A* right, int64_t right_stride, A* out, int64_t out_stride, bool add) {
  if (rows * cols * depth > kSmallProduct) return false;
  small_product(rows, cols, depth, left, left_stride, right, right_stride, out, out_stride, add);
  return true;
}

}  // namespace

// By AMX, or by the dot products of a processor that is not Intel's: Intel's make them at less than
// the rate of float32.
bool multiplies_bfloat16() {
  if (!at::globalContext().userEnabledMkldnn()) return false;
  return blas::could_pack(at::kBFloat16) || (!runs_as_float(at::kBFloat16) && mkl_is_slow());
}

void multiply(int64_t rows, int64_t cols, int64_t depth, const bf16* left, int64_t left_stride,
              const bf16* right, int64_t right_stride, float* out, int64_t out_stride, bool add) {
  if (rows * cols * depth == 0) {
    return small_product<float>(rows, cols, 0, nullptr, 0, nullptr, 0, out, out_stride, add);
  }
  blas::brgemm(rows, cols, depth, left_stride, right_stride, out_stride, add,
               reinterpret_cast<const at::BFloat16*>(left),
               reinterpret_cast<const at::BFloat16*>(right), out, /*is_vnni=*/true);
}

void multiply(int64_t rows, int64_t cols, int64_t depth, const float* left, int64_t left_stride,
              const float* right, int64_t right_stride, float* out, int64_t out_stride, bool add) {
  if (small_multiply(rows, cols, depth, left, left_stride, right, right_stride, out, out_stride,
                     add)) {
    return;
  }
  blas::brgemm(rows, cols, depth, left_stride, right_stride, out_stride, add, left, right, out,
               /*is_vnni=*/false);
}

void multiply(int64_t rows, int64_t cols, int64_t depth, const double* left, int64_t left_stride,
              const double* right, int64_t right_stride, double* out, int64_t out_stride,
              bool add) {
  if (small_multiply(rows, cols, depth, left, left_stride, right, right_stride, out, out_stride,
                     add)) {
    return;
  }
  const auto matrix = [](const double* data, int64_t rows, int64_t cols, int64_t stride) {
    return Matrix<double>{const_cast<double*>(data), rows, cols, stride};
  };
  product(matrix(out, rows, cols, out_stride), matrix(left, rows, depth, left_stride),
          matrix(right, depth, cols, right_stride), 1.0, add ? 1.0 : 0.0);
}

template <typename C>
void end_products() {
  if (kRowsAbreast<C> != 1) blas::brgemm_release();
}
template void end_products<bf16>();
template void end_products<float>();
template void end_products<double>();

}  // namespace ckptfused::tiles
