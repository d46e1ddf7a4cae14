#pragma once

#include <cstdint>

#include "math/dropout.h"
#include "math/types.h"

namespace ckptfused {

// Row kernels between the matrix products of tiled attention. A tile is at most kQueryTile queries
// of one head by kKeyTile keys; its scores are rows of the accumulation type. The [T, T] matrix
// never exists.
constexpr int64_t kQueryTile = 128;
constexpr int64_t kKeyTile = 256;

enum class MaskKind : int { none, keep, drop, add };

// A mask over the [queries, keys] of one head: element strides of any kind, 0 included.
struct MaskView {
  MaskKind kind = MaskKind::none;
  DType dtype = DType::f32;  // of an additive mask; the other kinds are one byte an element
  const void* data = nullptr;
  int64_t query_stride = 0, key_stride = 0;
};

// What turns the products q.k of one head of one sequence into dropped probabilities.
struct AttentionRule {
  int64_t keys = 0;  // of the whole sequence
  double scale = 1.0;
  bool causal = false;
  int64_t window = 0;    // 0: none
  double softcap = 0.0;  // 0: none
  MaskView mask, padding;
  Dropout dropout;
  int64_t dropout_row = 0;  // of query 0
};

// Queries [query, query + rows) by keys [key, key + cols), of which those beyond the sequence are
// padding; cols is a multiple of 32, key of 8. Rows of scores are stride apart.
struct ScoreTile {
  int64_t query, rows, key, cols, stride;
};

// What the online softmax carries from one key tile to the next, a row a query. Start with max
// -inf, sum 0, out 0.
template <typename A>
struct SoftmaxRows {
  A* max;  // of logits, or of products where nothing but a positive scale comes between
  A* sum;  // of exp(logit - the largest), before dropout
  A* out;  // [rows, head_dim], sum of dropped exp(logit - max) times v
  int64_t head_dim;
};

// scores: products q.k. probs, which may be scores: exp(logit - max), 0 where masked or dropped.
// Brings the rows' sums and outputs to the new maximum; the caller adds probs @ v to out.
template <typename A, typename C>
void attention_fwd_tile(const AttentionRule& rule, const ScoreTile& tile, A* scores,
                        const SoftmaxRows<A>& state, C* probs, int64_t probs_stride);

// After the last tile: o = out / sum * dropout scale, lse = the largest logit + log(sum); 0 and
// -inf for a row that is masked throughout.
template <typename T>
void attention_finish_rows(const SoftmaxRows<acc_t<T>>& state, const AttentionRule& rule,
                           int64_t rows, T* o, int64_t o_stride, acc_t<T>* lse);

// delta[r] = sum of dout * o, the term that softmax takes off every gradient of its row.
template <typename T>
void attention_delta_rows(const T* dout, int64_t dout_stride, const T* o, int64_t o_stride,
                          int64_t rows, int64_t cols, acc_t<T>* delta);

// Where backward's results go as operands (operands.h) whose rows are as wide as the tile, if they
// are narrower than A.
template <typename C>
struct BackwardOperands {
  C *right_probs, *right_dprobs, *left_dprobs;
};

// scores: products q.k; become the dropped probabilities. dprobs: dout @ v^T; become the gradients
// of the products. Both are 0 where masked.
template <typename A, typename C>
void attention_bwd_tile(const AttentionRule& rule, const ScoreTile& tile, A* scores, A* dprobs,
                        const A* lse, const A* delta, const BackwardOperands<C>& out);

// out [rows, cols] = left [rows, depth] @ right [depth, cols], or added to it, where that costs
// less than the call of a library. Rows are strides apart.
template <typename A>
void small_product(int64_t rows, int64_t cols, int64_t depth, const A* left, int64_t left_stride,
                   const A* right, int64_t right_stride, A* out, int64_t out_stride, bool add);

// out [rows, cols] = in, rounded to T; rows are strides apart.
template <typename T>
void store_tile(const acc_t<T>* in, int64_t in_stride, int64_t rows, int64_t cols, T* out,
                int64_t out_stride);

}  // namespace ckptfused
