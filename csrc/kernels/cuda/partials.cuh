#pragma once

#include "kernels/cuda/launch.cuh"

// The second step of a parameter's gradient: the sum of the partial rows that the blocks of the
// first step left. Its order depends on their number alone.

namespace ckptfused {

constexpr int kPartialCols = 32;   // columns of a block
constexpr int kPartialLanes = 16;  // threads of a column, each sums every 16th partial row

// Blocks with blockIdx.y 0 sum dweight, those with 1 dbias.
template <typename A>
struct Partials {
  const A *dweight_partials, *dbias_partials;
  A *dweight, *dbias;
};

template <typename A>
__global__ void __launch_bounds__(kPartialCols* kPartialLanes)
    sum_partials_kernel(Partials<A> p, int64_t count, int64_t cols) {
  __shared__ A sums[kPartialLanes][kPartialCols];
  const int lane = int(threadIdx.x) / kPartialCols, thread_col = int(threadIdx.x) % kPartialCols;
  const int64_t col = int64_t(blockIdx.x) * kPartialCols + thread_col;
  const A* from = blockIdx.y == 0 ? p.dweight_partials : p.dbias_partials;
  A* to = blockIdx.y == 0 ? p.dweight : p.dbias;
  A sum = 0;
  if (to != nullptr && col < cols) {
#if defined(__CUDACC__)
#pragma unroll 8
#endif
    for (int64_t row = lane; row < count; row += kPartialLanes) sum += from[row * cols + col];
  }
  sums[lane][thread_col] = sum;
  __syncthreads();
  if (lane == 0 && to != nullptr && col < cols) {
    for (int other = 1; other < kPartialLanes; ++other) sum += sums[other][thread_col];
    to[col] = sum;
  }
}

// dweight[c] and dbias[c], [cols], from partials [count, cols]; all of type A. Either pair may be
// null.
template <typename A>
const char* sum_partials_cuda(const void* dweight_partials, const void* dbias_partials,
                              int64_t count, int64_t cols, void* dweight, void* dbias,
                              void* stream) {
  if ((dweight == nullptr && dbias == nullptr) || cols == 0) return nullptr;
  const Partials<A> partials{static_cast<const A*>(dweight_partials),
                             static_cast<const A*>(dbias_partials), static_cast<A*>(dweight),
                             static_cast<A*>(dbias)};
  dim3 grid = grid_of((cols + kPartialCols - 1) / kPartialCols);
  grid.y = dbias == nullptr ? 1 : 2;
  return launch(sum_partials_kernel<A>, grid, dim3(kPartialCols * kPartialLanes), stream, partials,
                count, cols);
}

}  // namespace ckptfused
