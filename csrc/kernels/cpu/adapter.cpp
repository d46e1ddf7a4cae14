#include "kernels/cpu/adapter.h"

#include "kernels/cpu/rows.h"

#define CKPT_KERNEL_FILE "kernels/cpu/adapter.inl"
#include "kernels/cpu/foreach_target.h"

namespace ckptfused {

template <typename T>
void adapter_load_rows(const AdapterBlock& a, const T* in, int64_t stride, acc_t<T>* out) {
  CKPT_DISPATCH(load_dropped<T>)(a, in, stride, out);
}

template <typename T>
void adapter_add_rows(const AdapterBlock& a, const acc_t<T>* in, T* out, int64_t stride) {
  CKPT_DISPATCH(add_dropped<T>)(a, in, out, stride);
}

template <typename A>
void adapter_sum_rows(int64_t rows, int64_t cols, const A* in, A scale, A* sums) {
  CKPT_DISPATCH(sum_rows<A>)(rows, cols, in, scale, sums);
}

template <typename A>
void adapter_add_partials(const A* partials, int64_t count, int64_t stride, int64_t n, A* out) {
  CKPT_DISPATCH(add_partials<A>)(partials, count, stride, n, out);
}

#define CKPT_INSTANTIATE_ACC(A)                                         \
  template void adapter_sum_rows<A>(int64_t, int64_t, const A*, A, A*); \
  template void adapter_add_partials<A>(const A*, int64_t, int64_t, int64_t, A*);
CKPT_INSTANTIATE_ACC(double)
CKPT_INSTANTIATE_ACC(float)

#define CKPT_INSTANTIATE(T)                                                              \
  template void adapter_load_rows<T>(const AdapterBlock&, const T*, int64_t, acc_t<T>*); \
  template void adapter_add_rows<T>(const AdapterBlock&, const acc_t<T>*, T*, int64_t);
CKPT_INSTANTIATE(double)
CKPT_INSTANTIATE(float)
CKPT_INSTANTIATE(bf16)
CKPT_INSTANTIATE(f16)

}  // namespace ckptfused
