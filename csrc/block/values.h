#pragma once

#include "ops/torch.h"

namespace ckptfused {

// The intermediates of a block, each undefined until its ensure_ function has made it. Tensors of
// the residual stream have its type R and shape [N, C]; the rest has the compute type P.
struct Values {
  at::Tensor n1;       // pre_norm(x), P
  at::Tensor qkv;      // raw product [N, W]
  at::Tensor q, k, v;  // after q/k norm and RoPE: views [B, heads, T, D]
  at::Tensor o, lse;   // [B, T, H*D] and [B, H, T]
  at::Tensor proj;     // attention projection [N, C], P
  at::Tensor mid;      // x + m * drop(post(proj)), R
  at::Tensor ffn_in;   // input of the FFN half: mid, or its closing norm, R
  at::Tensor n2;       // pre_norm(ffn_in), P
  at::Tensor gu;       // N * 2F or N * F entries, tile after tile; only where it is kept
  at::Tensor down;     // FFN product [N, C], P
  at::Tensor out;      // sum before the closing norm of the FFN half, R
};

// One matrix among those whose products lie side by side in a buffer: buffer columns
// [col0, col0 + width) = in @ W[row0 : row0 + width]^T + b.
struct Part {
  int weight, bias;  // slots
  int64_t row0, width, col0;
};

// The parts of a tile as one matrix, so that each of its products is one.
struct Joined {
  at::Tensor weight, bias;  // copies side by side, where a product reads them
  bool tile = false;        // whether the gradients of its weights are one product
};

// What of the attention's input a block projects: of a tile of queries q, and of its keys k and v.
enum class Projected { all, q, k_and_v };

}  // namespace ckptfused
