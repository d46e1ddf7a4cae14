#pragma once

#include "ops/torch.h"

#include <algorithm>

#include "kernels/cpu/attention.h"
#include "math/softmax.h"
#include "ops/attention.h"
#include "ops/tasks_cpu.h"

// Tiled attention on the CPU: everything that PyTorch's flash kernel does not do (dropout that can
// be replayed, masks, windows, soft caps, packed sequences), and its backward. A tile of scores is
// one matrix product, then row kernels, then one more; no [T, T] matrix is held. Half precision is
// converted tile by tile and rounded once, at the end.

namespace ckptfused {

std::tuple<at::Tensor, at::Tensor> attention_tiled_fwd(const AttentionProblem& a);

// dout, o: [B, H, T, D] as attention_operand gives them; lse [B, H, T] contiguous.
std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_tiled_bwd(const AttentionProblem& a,
                                                                   const at::Tensor& dout,
                                                                   const at::Tensor& o,
                                                                   const at::Tensor& lse);
// The same, but for dk and dv of the accumulation type [B, G, T, D], to which it adds. Returns dq.
at::Tensor attention_tiled_bwd_onto(const AttentionProblem& a, const at::Tensor& dout,
                                    const at::Tensor& o, const at::Tensor& lse,
                                    const at::Tensor& dk, const at::Tensor& dv);

// Scratch of one thread in bytes, where queries and keys are the longest sequence's (see the
// definitions for its parts; backward onto sums has none of keys). A call allocates this for
// min(threads, tasks) threads in one piece; tasks are sequences x heads x query tiles forward,
// sequences x kv_heads backward.
int64_t attention_fwd_scratch_bytes(at::ScalarType dtype, int64_t queries, int64_t keys,
                                    int64_t head_dim);
int64_t attention_bwd_scratch_bytes(at::ScalarType dtype, int64_t queries, int64_t keys,
                                    int64_t head_dim, bool onto);

namespace tiles {

// Rows [row, row + rows) of one head of t. Whoever gets those of an operand only reads them.
template <typename T>
Matrix<T> head_rows(const at::Tensor& t, int64_t batch, int64_t head, int64_t row, int64_t rows) {
  const T* data = static_cast<const T*>(t.const_data_ptr()) + batch * t.stride(0) +
                  head * t.stride(1) + row * t.stride(2);
  return {const_cast<T*>(data), rows, t.size(3), std::max(t.stride(2), t.size(3))};
}

// The rows in the accumulation type: themselves, or converted into buffer.
template <typename T>
Matrix<acc_t<T>> widen(const Matrix<T>& in, acc_t<T>* buffer) {
  if constexpr (kConverted<T>) {
    load_tile(in.data, in.stride, in.rows, in.cols, buffer);
    return {buffer, in.rows, in.cols, in.cols};
  } else {
    return in;
  }
}

inline MaskView mask_view(MaskKind kind, const at::Tensor& mask, int64_t offset,
                          int64_t query_stride, int64_t key_stride) {
  MaskView view;
  view.kind = kind;
  if (kind == MaskKind::none) return view;
  if (kind == MaskKind::add) view.dtype = kernel_dtype("attention", "mask", mask);
  view.data = static_cast<const char*>(mask.const_data_ptr()) + offset * mask.element_size();
  view.query_stride = query_stride;
  view.key_stride = key_stride;
  return view;
}

// The rule of head `head` in a sequence of the call. Masks are of dense batches, whose sequences
// begin at 0.
inline AttentionRule attention_rule(const AttentionProblem& a, int64_t sequence, int64_t head) {
  const AttentionSequence& s = a.sequences[sequence];
  AttentionRule rule;
  rule.keys = s.keys;
  rule.causal = a.causal;
  rule.window = a.window;
  rule.softcap = a.softcap;
  if (a.mask_kind != MaskKind::none) {
    const at::Tensor& m = a.mask;
    const int64_t offset = s.batch * m.stride(0) + head * m.stride(1);
    rule.mask = mask_view(a.mask_kind, m, offset, m.stride(2), m.stride(3));
  }
  if (a.padding_kind != MaskKind::none) {
    rule.padding =
        mask_view(a.padding_kind, a.padding, s.batch * a.padding.stride(0), 0, a.padding.stride(1));
  }
  rule.dropout = a.dropout;
  rule.dropout_row = (s.number * a.heads() + head) * a.max_queries;
  return rule;
}

// Multiplications up to which a product is ours: the call of a library alone takes as long. A
// function of the tile's shape, so that a replay has forward's bits.
constexpr int64_t kSmallProduct = int64_t(1) << 13;

// out = alpha * a @ b, or added to it.
template <typename A>
void tile_product(const Matrix<A>& out, const Matrix<A>& a, const Matrix<A>& b, double alpha,
                  bool add) {
  if (out.rows * out.cols * a.cols > kSmallProduct) {
    return product(out, a, b, alpha, add ? 1.0 : 0.0);
  }
  const auto strided = [](const Matrix<A>& m) {
    return SmallMatrix<A>{m.data, m.transposed ? 1 : m.stride, m.transposed ? m.stride : 1};
  };
  small_product(strided(out), strided(a), strided(b), out.rows, out.cols, a.cols, A(alpha), add);
}

// Calls f(tile) for the key tiles that some query of [query, query + rows) sees, in order.
template <typename F>
void for_key_tiles(const AttentionRule& rule, int64_t query, int64_t rows, F f) {
  const int64_t begin = visible_keys(query, rule.keys, rule.causal, rule.window).begin;
  const int64_t end = visible_keys(query + rows - 1, rule.keys, rule.causal, rule.window).end;
  for (int64_t key = begin / kKeyTile * kKeyTile; key < end; key += kKeyTile) {
    f(ScoreTile{query, rows, key, std::min(kKeyTile, rule.keys - key),
                std::min(kKeyTile, rule.keys)});
  }
}

}  // namespace tiles
}  // namespace ckptfused
