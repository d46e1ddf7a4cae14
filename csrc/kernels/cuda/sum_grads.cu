#include "kernels/cuda/sum_grads.h"

#include "kernels/cuda/launch.cuh"
#include "math/types.h"

// The second step of the gradients of norms' parameters: the sums of the partial rows that the
// blocks of the first step left. Their order depends on the number of rows alone.

namespace ckptfused {
namespace {

constexpr int kSumCols = 32;   // columns of a block
constexpr int kSumLanes = 16;  // threads of a column, each sums every 16th partial row

// Sum n is that of blocks first_block[n] to first_block[n + 1] - 1.
struct GradSums {
  GradSum sum[kMostGradSums];
  int64_t first_block[kMostGradSums + 1];
};

template <typename T, typename A>
CKPT_HD void store_at(A value, void* to, int64_t col) {
  from_acc(acc_t<T>(value), static_cast<T*>(to)[col]);
}

template <typename A>
__global__ void __launch_bounds__(kSumCols* kSumLanes)
    sum_grads_kernel(const __grid_constant__ GradSums sums) {
  __shared__ A lanes[kSumLanes][kSumCols];
  int n = 0;
  while (int64_t(blockIdx.x) >= sums.first_block[n + 1]) ++n;
  const GradSum& job = sums.sum[n];
  const int lane = int(threadIdx.x) / kSumCols, thread_col = int(threadIdx.x) % kSumCols;
  const int64_t col = (int64_t(blockIdx.x) - sums.first_block[n]) * kSumCols + thread_col;
  const A* from = static_cast<const A*>(job.from);
  A sum = 0;
  if (col < job.cols) {
#if defined(__CUDACC__)
#pragma unroll 8
#endif
    for (int64_t row = lane; row < job.count; row += kSumLanes) sum += from[row * job.cols + col];
  }
  lanes[lane][thread_col] = sum;
  __syncthreads();
  if (lane != 0 || col >= job.cols) return;
  for (int other = 1; other < kSumLanes; ++other) sum += lanes[other][thread_col];
  switch (job.type) {
    case DType::f64:
      return store_at<double>(sum, job.to, col);
    case DType::f32:
      return store_at<float>(sum, job.to, col);
    case DType::bf16:
      return store_at<bf16>(sum, job.to, col);
    case DType::f16:
      return store_at<f16>(sum, job.to, col);
  }
}

}  // namespace

const char* sum_grads_cuda(const GradSum* sums, int64_t count, DType acc, void* stream) {
  GradSums all{};
  if (count > kMostGradSums) return "too many sums of gradients";
  int64_t blocks = 0;
  for (int64_t n = 0; n < kMostGradSums; ++n) {
    if (n < count) {
      all.sum[n] = sums[n];
      blocks += (sums[n].cols + kSumCols - 1) / kSumCols;
    }
    all.first_block[n + 1] = blocks;
  }
  if (blocks == 0) return nullptr;
  const auto run = [&](auto kernel) {
    return launch(kernel, grid_of(blocks), dim3(kSumCols * kSumLanes), stream, all);
  };
  return acc == DType::f64 ? run(sum_grads_kernel<double>) : run(sum_grads_kernel<float>);
}

}  // namespace ckptfused
