#include "ops/torch.h"

#include <algorithm>

#include "kernels/cuda/sum_grads.h"
#include "kernels/qk.h"
#include "ops/launch_cuda.h"
#include "ops/sum_grads.h"

namespace ckptfused {
namespace {

void run(const std::vector<GradSum>& sums, DType acc, const RowCall& call) {
  const CudaLaunch cuda(call);
  const int64_t count = int64_t(sums.size());
  for (int64_t first = 0; first < count; first += kMostGradSums) {
    cuda.check(sum_grads_cuda(sums.data() + first, std::min(count - first, kMostGradSums), acc,
                              cuda.stream()));
  }
}

int64_t grad_chunks(const at::Tensor& like, int64_t rows, int64_t cols, int64_t heads) {
  const CudaLaunch cuda({"grad_chunks", like.device(), rows});
  return gpu_grad_chunks(rows, cols, heads, cuda.multiprocessors());
}

}  // namespace

TORCH_LIBRARY_IMPL(ckptfused, CUDA, m) {
  m.impl("sum_grads", &sum_grads<run>);
  m.impl("grad_chunks", &grad_chunks);
}

}  // namespace ckptfused
