#pragma once

#include <string>

// The build's CUDA side, as far as a CPU build can say it, too.

#ifndef CKPTFUSED_CUDA_ARCHS
#define CKPTFUSED_CUDA_ARCHS ""
#endif

namespace ckptfused {

// What the CUDA kernels were compiled for, such as "sm_80 sm_90 compute_90" (the last is PTX);
// empty in a CPU build.
inline constexpr const char* kCudaArchitectures = CKPTFUSED_CUDA_ARCHS;

struct Gpu {
  std::string name;
  int major, minor;  // compute capability
};

// Whether CUDA's words are those of an error that a kernel makes while it runs, which any later
// call may be the first to see.
inline bool is_asynchronous(const std::string& status) {
  for (const char* words : {"illegal", "misaligned", "assert", "unspecified launch failure",
                            "hardware stack error", "invalid program counter", "ECC"}) {
    if (status.find(words) != std::string::npos) return true;
  }
  return false;
}

// Why a launch failed, for a person. Where the kernels do not run on this GPU: what they were built
// for, and how to build for it.
inline std::string launch_error(const std::string& op, const std::string& status,
                                const std::string& built_for, const Gpu& gpu) {
  const bool other_gpu = status.find("no kernel image") != std::string::npos ||
                         status.find("PTX") != std::string::npos;
  if (!other_gpu && !is_asynchronous(status)) return op + ": CUDA says: " + status;
  if (!other_gpu) {
    return op + ": CUDA says: " + status +
           ". GPUs report such an error late, so it may be that of " +
           "an earlier kernel, also of another library. CUDA_LAUNCH_BLOCKING=1 shows whose it is.";
  }
  const std::string capability = std::to_string(gpu.major) + "." + std::to_string(gpu.minor);
  return op + ": ckptfused was built for " + built_for + ", which " + gpu.name +
         " (compute capability " + capability +
         ") does not run. Rebuild it in a checkout: " + "TORCH_CUDA_ARCH_LIST=" + capability +
         " pip install --no-build-isolation . " + "(CUDA says: " + status + ")";
}

}  // namespace ckptfused
