#include "kernels/cpu/attention.h"

#include "kernels/cpu/attention_rows.h"

#define CKPT_KERNEL_FILE "kernels/cpu/attention.inl"
#include "kernels/cpu/foreach_target.h"

namespace ckptfused {

template <typename A, typename C>
void attention_fwd_tile(const AttentionRule& rule, const ScoreTile& tile, A* scores,
                        const SoftmaxRows<A>& state, C* probs, int64_t probs_stride) {
  CKPT_DISPATCH(fwd_tile<A, C>)(rule, tile, scores, state, probs, probs_stride);
}

template <typename T>
void attention_finish_rows(const SoftmaxRows<acc_t<T>>& state, const AttentionRule& rule,
                           int64_t rows, T* o, int64_t o_stride, acc_t<T>* lse) {
  CKPT_DISPATCH(finish_rows<T>)(state, rule, rows, o, o_stride, lse);
}

template <typename T>
void attention_delta_rows(const T* dout, int64_t dout_stride, const T* o, int64_t o_stride,
                          int64_t rows, int64_t cols, acc_t<T>* delta) {
  CKPT_DISPATCH(delta_rows<T>)(dout, dout_stride, o, o_stride, rows, cols, delta);
}

template <typename A, typename C>
void attention_bwd_tile(const AttentionRule& rule, const ScoreTile& tile, A* scores, A* dprobs,
                        const A* lse, const A* delta, const BackwardOperands<C>& out) {
  CKPT_DISPATCH(bwd_tile<A, C>)(rule, tile, scores, dprobs, lse, delta, out);
}

template <typename A>
void small_product(int64_t rows, int64_t cols, int64_t depth, const A* left, int64_t left_stride,
                   const A* right, int64_t right_stride, A* out, int64_t out_stride, bool add) {
  CKPT_DISPATCH(small<A>)
  (rows, cols, depth, left, left_stride, right, right_stride, out, out_stride, add);
}

template <typename T>
void store_tile(const acc_t<T>* in, int64_t in_stride, int64_t rows, int64_t cols, T* out,
                int64_t out_stride) {
  CKPT_DISPATCH(store_rows<T>)(in, in_stride, rows, cols, out, out_stride);
}

#define CKPT_INSTANTIATE_TILE(A, C)                                                                \
  template void attention_fwd_tile<A, C>(const AttentionRule&, const ScoreTile&, A*,               \
                                         const SoftmaxRows<A>&, C*, int64_t);                      \
  template void attention_bwd_tile<A, C>(const AttentionRule&, const ScoreTile&, A*, A*, const A*, \
                                         const A*, const BackwardOperands<C>&);
CKPT_INSTANTIATE_TILE(double, double)
CKPT_INSTANTIATE_TILE(float, float)
CKPT_INSTANTIATE_TILE(float, bf16)

#define CKPT_INSTANTIATE_ACC(A)                                                                   \
  template void small_product<A>(int64_t, int64_t, int64_t, const A*, int64_t, const A*, int64_t, \
                                 A*, int64_t, bool);
CKPT_INSTANTIATE_ACC(double)
CKPT_INSTANTIATE_ACC(float)

#define CKPT_INSTANTIATE(T)                                                                     \
  template void attention_finish_rows<T>(const SoftmaxRows<acc_t<T>>&, const AttentionRule&,    \
                                         int64_t, T*, int64_t, acc_t<T>*);                      \
  template void attention_delta_rows<T>(const T*, int64_t, const T*, int64_t, int64_t, int64_t, \
                                        acc_t<T>*);                                             \
  template void store_tile<T>(const acc_t<T>*, int64_t, int64_t, int64_t, T*, int64_t);
CKPT_INSTANTIATE(double)
CKPT_INSTANTIATE(float)
CKPT_INSTANTIATE(bf16)
CKPT_INSTANTIATE(f16)

}  // namespace ckptfused
