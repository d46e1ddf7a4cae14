#include "kernels/cpu/attention.h"

#include "kernels/cpu/attention_rows.h"

#define CKPT_KERNEL_FILE "kernels/cpu/attention.inl"
#include "kernels/cpu/foreach_target.h"

namespace ckptfused {

template <typename A>
void attention_fwd_tile(const AttentionRule& rule, const ScoreTile& tile, A* scores,
                        const SoftmaxRows<A>& state) {
  CKPT_DISPATCH(fwd_tile<A>)(rule, tile, scores, state);
}

template <typename T>
void attention_finish_rows(const SoftmaxRows<acc_t<T>>& state, const Dropout& dropout, int64_t rows,
                           T* o, int64_t o_stride, acc_t<T>* lse) {
  CKPT_DISPATCH(finish_rows<T>)(state, dropout, rows, o, o_stride, lse);
}

template <typename T>
void attention_delta_rows(const acc_t<T>* dout, int64_t dout_stride, const T* o, int64_t o_stride,
                          int64_t rows, int64_t cols, acc_t<T>* delta) {
  CKPT_DISPATCH(delta_rows<T>)(dout, dout_stride, o, o_stride, rows, cols, delta);
}

template <typename A>
void attention_bwd_tile(const AttentionRule& rule, const ScoreTile& tile, A* scores, A* dprobs,
                        const A* lse, const A* delta) {
  CKPT_DISPATCH(bwd_tile<A>)(rule, tile, scores, dprobs, lse, delta);
}

template <typename A>
void small_product(const SmallMatrix<A>& out, const SmallMatrix<A>& a, const SmallMatrix<A>& b,
                   int64_t rows, int64_t cols, int64_t depth, A alpha, bool add) {
  CKPT_DISPATCH(small<A>)(out, a, b, rows, cols, depth, alpha, add);
}

template <typename T>
void load_tile(const T* in, int64_t in_stride, int64_t rows, int64_t cols, acc_t<T>* out) {
  CKPT_DISPATCH(load_rows<T>)(in, in_stride, rows, cols, out);
}

template <typename T>
void store_tile(const acc_t<T>* in, int64_t rows, int64_t cols, T* out, int64_t out_stride) {
  CKPT_DISPATCH(store_rows<T>)(in, rows, cols, out, out_stride);
}

#define CKPT_INSTANTIATE_ACC(A)                                                                 \
  template void attention_fwd_tile<A>(const AttentionRule&, const ScoreTile&, A*,               \
                                      const SoftmaxRows<A>&);                                   \
  template void attention_bwd_tile<A>(const AttentionRule&, const ScoreTile&, A*, A*, const A*, \
                                      const A*);                                                \
  template void small_product<A>(const SmallMatrix<A>&, const SmallMatrix<A>&,                  \
                                 const SmallMatrix<A>&, int64_t, int64_t, int64_t, A, bool);
CKPT_INSTANTIATE_ACC(double)
CKPT_INSTANTIATE_ACC(float)

#define CKPT_INSTANTIATE(T)                                                                     \
  template void attention_finish_rows<T>(const SoftmaxRows<acc_t<T>>&, const Dropout&, int64_t, \
                                         T*, int64_t, acc_t<T>*);                               \
  template void attention_delta_rows<T>(const acc_t<T>*, int64_t, const T*, int64_t, int64_t,   \
                                        int64_t, acc_t<T>*);                                    \
  template void load_tile<T>(const T*, int64_t, int64_t, int64_t, acc_t<T>*);                   \
  template void store_tile<T>(const acc_t<T>*, int64_t, int64_t, T*, int64_t);
CKPT_INSTANTIATE(double)
CKPT_INSTANTIATE(float)
CKPT_INSTANTIATE(bf16)
CKPT_INSTANTIATE(f16)

}  // namespace ckptfused
