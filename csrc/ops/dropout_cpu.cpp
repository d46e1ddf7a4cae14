#include "ops/torch.h"

#include "kernels/cpu/dropout.h"
#include "ops/row_args.h"

namespace ckptfused {
namespace {

at::Tensor dropout_mask(at::IntArrayRef shape, double p, const at::Tensor& rng_state,
                        int64_t site) {
  const char* op = "dropout_mask";
  TORCH_CHECK(!shape.empty(), op, ": shape: expected at least one dimension, got []");
  check_rng_state(op, rng_state, at::kCPU);
  const at::Tensor keep = at::empty(shape, rng_state.options().dtype(at::kBool));
  const int64_t cols = shape.back(), rows = cols == 0 ? 0 : keep.numel() / cols;
  const Dropout dropout = host_dropout(op, rng_state, p, site, cols);
  if (!dropout.active()) return keep.fill_(true);
  bool* out = keep.mutable_data_ptr<bool>();
  parallel_rows(rows, cols, [&](int64_t begin, int64_t end) {
    dropout_mask_rows(dropout, cols, begin, end, out + begin * cols);
  });
  return keep;
}

}  // namespace

TORCH_LIBRARY_IMPL(ckptfused, CPU, m) {
  m.impl("dropout_mask", &dropout_mask);
}

}  // namespace ckptfused
