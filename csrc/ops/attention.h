#pragma once

#include "ops/torch.h"

#include <string_view>
#include <vector>

#include "kernels/cpu/attention.h"
#include "math/softmax.h"
#include "ops/attention_choice.h"
#include "ops/checks.h"

namespace ckptfused {

// A run of tokens that attend to one another: a batch element, or one sequence of a packed batch.
struct AttentionSequence {
  int64_t batch, query, queries, key, keys;  // position in the tensors, and length
  int64_t number;                            // among those of the whole batch
  int64_t first = 0;                         // of its queries, where only some are given
};

// [sequence, query, queries]: the call is of queries [query, query + Tq) of a batch with that many,
// whose first sequence has that number; masks and dropout are the whole batch's. Empty: all of
// them.
using QueryTile = at::IntArrayRef;

// The checked arguments of attention_fwd and attention_bwd.
//
// Shapes: q [B, H, Tq, D]; k, v [B, G, Tk, D]; head h reads k and v of head h / (H / G). Entries of
// a row lie side by side (operands that do not were copied), the other strides are free.
struct AttentionProblem {
  at::Tensor q, k, v;
  at::Tensor mask;     // [B, H, Tq of the whole batch, Tk], expanded, or undefined
  at::Tensor padding;  // [B, Tk], expanded, or undefined
  MaskKind mask_kind, padding_kind;
  double scale;
  bool causal;
  int64_t window;  // 0: none, also when it covers every key
  double softcap;
  Dropout dropout;
  bool packed;
  std::vector<AttentionSequence> sequences;
  int64_t max_queries = 0, max_keys = 0;  // of a sequence of the whole batch

  int64_t batch() const { return q.size(0); }
  int64_t heads() const { return q.size(1); }
  int64_t kv_heads() const { return k.size(1); }
  int64_t head_dim() const { return q.size(3); }
  int64_t group() const { return heads() / kv_heads(); }

  // What decides who computes it.
  AttentionShape shape() const {
    const unsigned special = (mask_kind != MaskKind::none) * kHasMasks |
                             (padding_kind != MaskKind::none) * kHasPadding | packed * kHasPacked |
                             (window != 0) * kHasWindow | (softcap != 0.0) * kHasSoftcap |
                             dropout.active() * kHasDropout | !(scale >= kLeastScale) * kHasScale;
    return {special, q.scalar_type(), batch(), heads(), max_queries, max_keys, head_dim()};
  }
};

AttentionProblem attention_problem(const char* op, const at::Tensor& q, const at::Tensor& k,
                                   const at::Tensor& v, const OptionalTensor& mask,
                                   const OptionalTensor& padding, const OptionalTensor& cu_seqlens,
                                   const OptionalTensor& rng_state, std::string_view mask_kind,
                                   std::string_view padding_kind, double scale, bool causal,
                                   int64_t window, double softcap, double p, QueryTile tile = {});

// What backward is given of forward's results, checked: do and o as attention_operand has them, lse
// contiguous.
struct AttentionResult {
  at::Tensor dout, o, lse;
};
AttentionResult attention_result(const char* op, const AttentionProblem& a, const at::Tensor& dout,
                                 const at::Tensor& o, const at::Tensor& lse);

// The ops on the CPU. While a ledger is open they take meta tensors and stop short of the work.
std::tuple<at::Tensor, at::Tensor> attention_fwd_cpu(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& mask,
    const OptionalTensor& padding, const OptionalTensor& cu_seqlens,
    const OptionalTensor& rng_state, std::string_view mask_kind, std::string_view padding_kind,
    double scale, bool causal, int64_t window, double softcap, double p);
std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_bwd_cpu(
    const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& o, const at::Tensor& lse, const OptionalTensor& mask,
    const OptionalTensor& padding, const OptionalTensor& cu_seqlens,
    const OptionalTensor& rng_state, std::string_view mask_kind, std::string_view padding_kind,
    double scale, bool causal, int64_t window, double softcap, double p);

// The ops of a tile of queries, on any device: backward adds to dk and dv, of the accumulation
// type, and returns dq.
std::tuple<at::Tensor, at::Tensor> attention_tile_fwd(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& mask,
    const OptionalTensor& padding, const OptionalTensor& cu_seqlens,
    const OptionalTensor& rng_state, std::string_view mask_kind, std::string_view padding_kind,
    double scale, bool causal, int64_t window, double softcap, double p, QueryTile tile);
at::Tensor attention_tile_bwd(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                              const at::Tensor& v, const at::Tensor& o, const at::Tensor& lse,
                              const at::Tensor& dk, const at::Tensor& dv,
                              const OptionalTensor& mask, const OptionalTensor& padding,
                              const OptionalTensor& cu_seqlens, const OptionalTensor& rng_state,
                              std::string_view mask_kind, std::string_view padding_kind,
                              double scale, bool causal, int64_t window, double softcap, double p,
                              QueryTile tile);

// Bytes that PyTorch's flash kernel on the CPU allocates within itself (FlashAttentionKernel.cpp).
// kv_heads: of all batch elements.
int64_t flash_scratch_bytes(at::ScalarType dtype, int64_t kv_heads, int64_t queries, int64_t keys,
                            int64_t head_dim, int64_t threads, bool backward);

// t, or a copy of it whose rows [.., T, D] a matrix product can read in place.
at::Tensor attention_operand(const at::Tensor& t);

// A zeroed or uninitialised [B, heads, T, D] tensor whose memory is [B, T, heads, D].
at::Tensor attention_buffer(const at::Tensor& like, int64_t heads, int64_t tokens, bool zeroed);

}  // namespace ckptfused
