// What a block keeps for backward, and what it gets back.
#include "ops/torch.h"

#include <string>
#include <vector>

#include "block/block.h"
#include "ops/checks.h"

namespace ckptfused {

using at::Tensor;

std::vector<Tensor> Block::with_kept(const Tensor& y) const {
  std::vector<Tensor> result = {y.view(x_sizes_)};
  for (const Tensor& t : kept_values()) result.push_back(t);
  return result;
}

std::vector<Tensor> Block::kept_values() const {
  std::vector<Tensor> kept;
  if (!save_) return kept;
  const KeepSpec& keep = spec_.keep;
  const auto add = [&](const Tensor& t, int64_t width) {
    kept.push_back(t.view({x_sizes_[0], x_sizes_[1], width}));
  };
  if (keep.attn) {
    kept.push_back(value_.o);
    kept.push_back(value_.lse);
  }
  if (keep.mid) add(value_.mid, C_);
  if (keep.proj) add(value_.proj, C_);
  if (keep.qkv) add(value_.qkv, spec_.attn.qkv_width());
  if (keep.gu) add(value_.gu, spec_.ffn.gu_width());
  if (keep.out) add(spec_.ffn.out.on() ? value_.out : value_.down, C_);
  return kept;
}

void Block::restore(at::TensorList kept) {
  const KeepSpec& keep = spec_.keep;
  size_t next = 0;
  const auto take = [&] {
    TORCH_CHECK(next < kept.size(), "ckptfused: too few kept tensors, got ", kept.size());
    check_memory("ckptfused", "kept[" + std::to_string(next) + "]", kept[next]);
    return kept[next++].contiguous();  // a saved-tensor hook may have changed the strides
  };
  if (keep.attn) {
    value_.o = take();
    value_.lse = take();
  }
  if (keep.mid) value_.mid = rows_view(take());
  if (keep.proj) value_.proj = rows_view(take());
  if (keep.qkv) value_.qkv = rows_view(take());
  if (keep.gu) value_.gu = rows_view(take());
  if (keep.out) (spec_.ffn.out.on() ? value_.out : value_.down) = rows_view(take());
  TORCH_CHECK(next == kept.size(), "ckptfused: expected ", next, " kept tensors, got ",
              kept.size());
}

}  // namespace ckptfused
