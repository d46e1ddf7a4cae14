#pragma once

#include "math/instructions.h"

namespace ckptfused {

enum class NormKind : int { none, layernorm, rmsnorm, gemma, layernorm1p, layerscale };

// The RMS norms are layer norms whose mean is taken as 0, so one set of formulas serves all kinds.
CKPT_HD bool norm_is_centred(NormKind kind) {
  return kind == NormKind::layernorm || kind == NormKind::layernorm1p;
}

// Whether the gain is 1 + w: the 1 is added where weights are converted to the accumulation type.
CKPT_HD bool norm_adds_one(NormKind kind) {
  return kind == NormKind::gemma || kind == NormKind::layernorm1p;
}

// LayerScale multiplies a row by its weight and normalises nothing: its mean is 0, its rstd is 1,
// and neither depends on the row.
CKPT_HD bool norm_has_stats(NormKind kind) {
  return kind != NormKind::none && kind != NormKind::layerscale;
}

template <typename A>
struct NormStats {
  A mean, rstd;
};

// variance: the biased mean of (x - mean)^2.
template <typename A>
CKPT_HD NormStats<A> make_norm_stats(A mean, A variance, A eps) {
  return {mean, rsqrt_approx(variance + eps)};
}

// xhat, the normalised element before weight and bias.
template <typename A>
CKPT_HD A normalised(A x, NormStats<A> stats) {
  return (x - stats.mean) * stats.rstd;
}

// The input's gradient from g = dy * weight, where mean_g and mean_gx are the row's means of g
// (0 for a norm that is not centred) and of g * xhat.
template <typename A>
CKPT_HD A norm_input_grad(A g, A xhat, A rstd, A mean_g, A mean_gx) {
  return rstd * (g - mean_g - xhat * mean_gx);
}

}  // namespace ckptfused
