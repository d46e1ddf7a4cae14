#include "ops/torch.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/cuda/CUDAGuard.h>

#include <cmath>

#include "ops/attention.h"
#include "ops/attention_gpu.h"
#include "ops/launch_records.h"

namespace ckptfused {
namespace {

using at::Tensor;

AttentionGpu gpu_of(at::Device device) {
  static const int64_t cudnn =
      at::detail::getCUDAHooks().hasCuDNN() ? at::detail::getCUDAHooks().versionRuntimeCuDNN() : 0;
  const cudaDeviceProp* properties = at::cuda::getDeviceProperties(device.index());
  return {properties->major, properties->minor, cudnn};
}

// Whether this thread has a context of the driver's.
bool has_context() {
  using CtxGetCurrent = int (*)(void**);
  static const auto current = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    C10_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuCtxGetCurrent", &function, 12000,
                                                    cudaEnableDefault, &found));
    return found == cudaDriverEntryPointSuccess ? reinterpret_cast<CtxGetCurrent>(function)
                                                : nullptr;
  }();
  void* context = nullptr;
  return current != nullptr && current(&context) == 0 && context != nullptr;
}

// The stream that a launch goes to. The driver, unlike CUDA's run-time library, does not make the
// device's context the thread's; one that the user made the thread's stays.
void* stream_of(at::Device device) {
  if (!has_context()) C10_CUDA_CHECK(cudaSetDevice(device.index()));
  return c10::cuda::getCurrentCUDAStream(device.index()).stream();
}

// The kernel of a call. Only sizes are read here: the arguments are checked where it is made.
AttentionKernel kernel_of(const Tensor& q, const Tensor& k, const OptionalTensor& mask,
                          const OptionalTensor& padding, const OptionalTensor& cu_seqlens,
                          double scale, int64_t window, double softcap, double p) {
  if (q.dim() != 4 || k.dim() != 4) return AttentionKernel::triton;
  const int64_t queries = q.size(2), keys = k.size(2);
  unsigned special = 0;
  if (given(mask)) special |= kHasMasks;
  if (given(padding)) special |= kHasPadding;
  if (given(cu_seqlens)) special |= kHasPacked;
  if (window != 0 && window < std::max(queries, keys)) special |= kHasWindow;
  if (softcap != 0.0) special |= kHasSoftcap;
  if (std::nearbyint(p * 65536) != 0) special |= kHasDropout;
  if (!(scale >= kLeastScale)) special |= kHasScale;
  const AttentionShape shape = {special, q.scalar_type(), q.size(0), q.size(1), queries,
                                keys,    q.size(3)};
  return attention_kernel(shape, gpu_of(q.device()), attention_override());
}

std::tuple<Tensor, Tensor> attention_fwd(const Tensor& q, const Tensor& k, const Tensor& v,
                                         const OptionalTensor& mask, const OptionalTensor& padding,
                                         const OptionalTensor& cu_seqlens,
                                         const OptionalTensor& rng_state,
                                         std::string_view mask_kind, std::string_view padding_kind,
                                         double scale, bool causal, int64_t window, double softcap,
                                         double p) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::cuda::CUDAGuard device(q.device());
  const AttentionKernel kernel =
      kernel_of(q, k, mask, padding, cu_seqlens, scale, window, softcap, p);
  if (kernel == AttentionKernel::triton) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("ckptfused::attention_triton_fwd", "")
                               .typed<decltype(attention_fwd)>();
    return call_recorded(op, stream_of(q.device()), q, k, v, mask, padding, cu_seqlens, rng_state,
                         mask_kind, padding_kind, scale, causal, window, softcap, p);
  }
  const AttentionProblem a =
      attention_problem("attention_fwd", q, k, v, mask, padding, cu_seqlens, rng_state, mask_kind,
                        padding_kind, scale, causal, window, softcap, /*p=*/0.0);
  return attention_aten_fwd(kernel, a.q, a.k, a.v, scale, causal);
}

std::tuple<Tensor, Tensor, Tensor> attention_bwd(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
    const Tensor& lse, const OptionalTensor& mask, const OptionalTensor& padding,
    const OptionalTensor& cu_seqlens, const OptionalTensor& rng_state, std::string_view mask_kind,
    std::string_view padding_kind, double scale, bool causal, int64_t window, double softcap,
    double p) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::cuda::CUDAGuard device(q.device());
  const AttentionKernel kernel =
      kernel_of(q, k, mask, padding, cu_seqlens, scale, window, softcap, p);
  if (kernel == AttentionKernel::triton) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("ckptfused::attention_triton_bwd", "")
                               .typed<decltype(attention_bwd)>();
    return call_recorded(op, stream_of(q.device()), dout, q, k, v, o, lse, mask, padding,
                         cu_seqlens, rng_state, mask_kind, padding_kind, scale, causal, window,
                         softcap, p);
  }
  const char* name = "attention_bwd";
  const AttentionProblem a =
      attention_problem(name, q, k, v, mask, padding, cu_seqlens, rng_state, mask_kind,
                        padding_kind, scale, causal, window, softcap, /*p=*/0.0);
  const AttentionResult result = attention_result(name, a, dout, o, lse);
  return attention_aten_bwd(kernel, result.dout, a.q, a.k, a.v, result.o, result.lse, scale,
                            causal);
}

TORCH_LIBRARY_IMPL(ckptfused, CUDA, m) {
  set_gpu_of(&gpu_of);
  m.impl("attention_fwd", &attention_fwd);
  m.impl("attention_bwd", &attention_bwd);
}

}  // namespace
}  // namespace ckptfused
