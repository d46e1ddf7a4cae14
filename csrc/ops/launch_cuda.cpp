#include "ops/torch.h"

#include "ops/launch_cuda.h"

#include "ops/cuda_build.h"

namespace ckptfused {
namespace {

int attribute(cudaDeviceAttr which) {
  int value = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, c10::cuda::current_device()));
  return value;
}

}  // namespace

CudaLaunch::CudaLaunch(const RowCall& call) : op_(call.op) {
  TORCH_CHECK(call.device.is_cuda(), op_, ": expected tensors on one CUDA device, got ",
              call.device);
  guard_.set_device(call.device);
}

int CudaLaunch::multiprocessors() const {
  return attribute(cudaDevAttrMultiProcessorCount);
}

void CudaLaunch::check(const char* status) const {
  if (status == nullptr) return;
  cudaDeviceProp properties{};  // stays empty where CUDA answers nothing after an error
  (void)cudaGetDeviceProperties(&properties, c10::cuda::current_device());
  TORCH_CHECK(false, launch_error(op_, status, kCudaArchitectures,
                                  {properties.name, properties.major, properties.minor}));
}

}  // namespace ckptfused
