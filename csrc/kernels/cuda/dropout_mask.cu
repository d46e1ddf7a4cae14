#include "kernels/cuda/dropout.h"
#include "kernels/cuda/elements.cuh"

namespace ckptfused {
namespace {

// words: rows start at multiples of eight bytes.
__global__ void __launch_bounds__(kElementThreads)
    dropout_mask_kernel(Dropout d, const int64_t* rng_state, ElementGrid grid, bool words,
                        bool* keep) {
  const Dropout dropout = with_state(d, rng_state);
  for_groups(grid, [&](int64_t row, int64_t col, int count) {
    Philox4x32 draws = {};
    if (dropout.active()) draws = dropout.draw(row, col / kGroup);
    uint64_t bytes = 0;  // little-endian, as they lie in memory
    CKPT_UNROLL
    for (int i = 0; i < kGroup; ++i) {
      const uint32_t draw = (draws.word[i >> 1] >> (16 * (i & 1))) & 0xffffu;
      bytes |= uint64_t(draw >= dropout.threshold) << (8 * i);
    }
    bool* to = keep + row * grid.cols + col;
    if (words) {
      *reinterpret_cast<uint64_t*>(to) = bytes;
    } else {
      for (int i = 0; i < count; ++i) to[i] = (bytes >> (8 * i) & 1) != 0;
    }
  });
}

}  // namespace

const char* dropout_mask_cuda(const Dropout& d, const int64_t* rng_state, int64_t rows,
                              int64_t cols, bool* keep, void* stream) {
  const ElementGrid grid(rows, cols);
  if (grid.empty()) return nullptr;
  const bool words = cols % 8 == 0 && reinterpret_cast<uintptr_t>(keep) % 8 == 0;
  return launch(dropout_mask_kernel, grid.blocks(), dim3(kElementThreads), stream, d, rng_state,
                grid, words, keep);
}

}  // namespace ckptfused
