#include "kernels/cpu/operands.h"

#include "kernels/cpu/operand_rows.h"

namespace ckptfused {

// Rows whose columns are taken at a time: their cache lines are all in the first cache.
constexpr int64_t kRowBlock = 16;

}  // namespace ckptfused

#define CKPT_KERNEL_FILE "kernels/cpu/operands.inl"
#include "kernels/cpu/foreach_target.h"

namespace ckptfused {

template <typename T, typename C>
void left_rows(const T* in, int64_t stride, int64_t rows, int64_t cols, C* left, int64_t out_rows,
               int64_t out_cols) {
  CKPT_DISPATCH(left_row_copies<T, C>)(in, stride, rows, cols, left, out_rows, out_cols);
}

template <typename T, typename C>
void left_columns(const T* in, int64_t stride, int64_t rows, int64_t cols, C* left,
                  int64_t out_cols) {
  CKPT_DISPATCH(left_column_copies<T, C>)(in, stride, rows, cols, left, out_cols);
}

template <typename T, typename C>
void right_rows(const T* in, int64_t stride, int64_t rows, int64_t cols, C* right,
                int64_t out_rows) {
  CKPT_DISPATCH(right_row_copies<T, C>)(in, stride, rows, cols, right, out_rows);
}

template <typename T, typename C>
void right_columns(const T* in, int64_t stride, int64_t rows, int64_t cols, C* right,
                   int64_t out_rows, int64_t out_cols) {
  CKPT_DISPATCH(right_column_copies<T, C>)(in, stride, rows, cols, right, out_rows, out_cols);
}

template <typename A>
void add_transposed(const A* products, int64_t product_stride, int64_t rows, int64_t cols, A* sums,
                    int64_t stride) {
  CKPT_DISPATCH(transposed_sums<A>)(products, product_stride, rows, cols, sums, stride);
}

#define CKPT_INSTANTIATE(T, C)                                                              \
  template void left_rows<T, C>(const T*, int64_t, int64_t, int64_t, C*, int64_t, int64_t); \
  template void left_columns<T, C>(const T*, int64_t, int64_t, int64_t, C*, int64_t);       \
  template void right_rows<T, C>(const T*, int64_t, int64_t, int64_t, C*, int64_t);         \
  template void right_columns<T, C>(const T*, int64_t, int64_t, int64_t, C*, int64_t, int64_t);
CKPT_INSTANTIATE(double, double)
CKPT_INSTANTIATE(float, float)
CKPT_INSTANTIATE(float, bf16)
CKPT_INSTANTIATE(bf16, float)
CKPT_INSTANTIATE(bf16, bf16)
CKPT_INSTANTIATE(f16, float)

template void add_transposed<double>(const double*, int64_t, int64_t, int64_t, double*, int64_t);
template void add_transposed<float>(const float*, int64_t, int64_t, int64_t, float*, int64_t);

}  // namespace ckptfused
