// In a CPU build, what a CUDA tensor meets instead of a kernel: one clear error.
#include "ops/torch.h"

#include "ops/cuda_build.h"

namespace ckptfused {
namespace {

void built_without_cuda(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK(false, op.schema().name(),
              ": got a CUDA tensor, but ckptfused was built for the CPU ",
              "alone. With a PyTorch for CUDA and nvcc on PATH, rebuild it in a checkout: ",
              "pip install --no-build-isolation .");
}

}  // namespace

TORCH_LIBRARY_IMPL(ckptfused, CUDA, m) {
  if (*kCudaArchitectures != '\0') return;
  for (const char* op :
       {"rng_state", "dropout_mask", "norm_fwd", "norm_bwd", "residual_fwd", "residual_bwd",
        "activation_fwd", "activation_bwd", "qk_fwd", "qk_bwd", "grad_chunks", "sum_grads"}) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&built_without_cuda>());
  }
}

}  // namespace ckptfused
