#include "kernels/cuda/cross_entropy.cuh"
#include "kernels/cuda/cross_entropy.h"

namespace ckptfused {
namespace {

template <typename T, bool kPlain>
__global__ void __launch_bounds__(kLossThreads, kLossBlocks<acc_t<T>>)
    cross_entropy_bwd_kernel(CrossEntropyBwd a, bool vectors) {
  using A = acc_t<T>;
  const int64_t row = blockIdx.x;
  const A factor = a.factor == nullptr ? A(1) : static_cast<const A*>(a.factor)[row];
  write_gradient<kPlain>(a, static_cast<T*>(a.logits) + row * a.stride, vectors, a.target[row],
                         static_cast<const A*>(a.lse)[row], factor);
}

}  // namespace

const char* cross_entropy_bwd_cuda(const CrossEntropyBwd& a, int64_t rows, void* stream) {
  if (rows == 0 || a.cols == 0) return nullptr;
  return for_type_and_logits(a, [&](auto t, auto plain) {
    using T = decltype(t);
    return launch(cross_entropy_bwd_kernel<T, decltype(plain)::value>, grid_of(rows),
                  dim3(kLossThreads), stream, a, whole_vectors<T>(a.logits, a.stride));
  });
}

}  // namespace ckptfused
