#pragma once

#include "ops/row_args.h"

// The dropout_mask op on any device: checks, then kRun.

namespace ckptfused {

// keep: of call.rows rows; the dropout is active.
template <void (*kRun)(Dropout, int64_t cols, bool* keep, const RowCall&)>
at::Tensor dropout_mask(at::IntArrayRef shape, double p, const at::Tensor& rng_state,
                        int64_t site) {
  const char* op = "dropout_mask";
  TORCH_CHECK(!shape.empty(), op, ": shape: expected at least one dimension, got []");
  const at::Device device = rng_state.device();
  check_rng_state(op, rng_state, device);
  const at::Tensor keep = at::empty(shape, rng_state.options().dtype(at::kBool));
  const int64_t cols = shape.back(), rows = cols == 0 ? 0 : keep.numel() / cols;
  const Dropout dropout = checked_dropout(op, rng_state, p, site, cols, device);
  if (!dropout.active()) return keep.fill_(true);
  kRun(dropout, cols, keep.mutable_data_ptr<bool>(), {op, device, rows, rng_state});
  return keep;
}

}  // namespace ckptfused
