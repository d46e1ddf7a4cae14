#pragma once

#include "ops/torch.h"

#include <algorithm>

#include "kernels/cpu/attention.h"
#include "kernels/cpu/operands.h"
#include "math/softmax.h"
#include "ops/attention.h"
#include "ops/tasks_cpu.h"
#include "ops/tile_product_cpu.h"

// Tiled attention on the CPU: a tile of scores is one matrix product, then row kernels, then one
// more; no [T, T] matrix is held. It does everything that PyTorch's flash kernel does not (dropout
// that can be replayed, masks, windows, soft caps, packed sequences).
//
// A tile's operands are copied first, to where and as its products take them (operands.h): keys and
// values once for many tiles of queries, which are the inner loop. bfloat16 is multiplied as it is
// where the processor is faster for it; half precision is converted to float32 otherwise, and
// rounded once, at the end.

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

namespace tiles {

// Queries of a head that a forward's task takes, and keys that a backward's does at a time: their
// operands and sums stay in a core's second cache.
constexpr int64_t kQueryRun = 1024, kKeyRun = 1024;

// A tile's rows and columns are filled up to multiples of these: row kernels have whole vectors,
// and products have few shapes, for each of which a kernel is compiled (but those into an output,
// which has no more rows than its own). Short rows are not filled up to many times as many.
constexpr int64_t kColumnStep = 32;
inline int64_t filled(int64_t n, int64_t step) {
  return (n + step - 1) / step * step;
}
inline int64_t filled_cols(int64_t n) {
  return filled(n, kColumnStep);
}
inline int64_t filled_rows(int64_t n) {
  return filled(n, n < 32 ? 4 : 32);
}
// Columns of a tile of so many keys that products take: row kernels fill up what is beyond.
inline int64_t multiplied_cols(int64_t keys, int64_t cols) {
  return keys <= kColumnStep / 2 ? kColumnStep / 2 : cols;
}

// The longest tile and run of a call.
struct TileSizes {
  int64_t queries, keys;    // of the longest sequence
  int64_t group, head_dim;  // query heads of a key/value head
  int64_t rows = filled_rows(std::min(kQueryTile, queries)),
          cols = filled_cols(std::min(kKeyTile, keys));

  // The head's width as a product's depth.
  template <typename C>
  int64_t depth() const {
    return head_dim + head_dim % kRowsAbreast<C>;
  }
};

inline TileSizes tile_sizes(const AttentionProblem& a) {
  return {std::min(a.max_queries, a.q.size(2)), a.max_keys, a.group(), a.head_dim()};
}

// Rows of one head: of a tensor, or of its sums in scratch.
template <typename T>
struct HeadRows {
  T* data;
  int64_t stride;
  T* row(int64_t r) const { return data + r * stride; }
};

// Those of a tensor from `row` on. Whoever gets those of an operand only reads them.
template <typename T>
HeadRows<T> head_rows(const at::Tensor& t, int64_t batch, int64_t head, int64_t row) {
  const T* data = static_cast<const T*>(t.const_data_ptr()) + batch * t.stride(0) +
                  head * t.stride(1) + row * t.stride(2);
  return {const_cast<T*>(data), t.stride(2)};
}

// Calls f(T{}, C{}) with the type of dtype and the one that its tiles are multiplied in.
template <typename F>
auto for_tile_types(at::ScalarType dtype, F f) {
  if (dtype == at::kBFloat16 && multiplies_bfloat16()) return f(bf16{}, bf16{});
  return for_dtype(dtype, [&](auto type) { return f(type, acc_t<decltype(type)>{}); });
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
  rule.scale = a.scale;
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

// The tile of queries [query, query + rows) and the keys from `key` on, a multiple of kKeyTile;
// none of its columns where no query sees any.
inline ScoreTile score_tile(const AttentionRule& rule, int64_t query, int64_t rows, int64_t key,
                            int64_t stride) {
  const KeyRange first = visible_keys(query, rule.keys, rule.causal, rule.window);
  const KeyRange last = visible_keys(query + rows - 1, rule.keys, rule.causal, rule.window);
  const int64_t end = std::min(key + kKeyTile, last.end);
  const bool seen = key + kKeyTile > first.begin && end > key;
  return {query, rows, key, seen ? filled_cols(end - key) : 0, stride};
}

}  // namespace tiles
}  // namespace ckptfused
