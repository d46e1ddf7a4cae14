#include "kernels/cpu/target.h"

#include <cstdlib>
#include <cstring>

namespace ckptfused {
namespace {

CpuTarget detect() {
#if CKPT_HAS_X86_TARGETS
  CpuTarget best = CpuTarget::baseline;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) best = CpuTarget::avx2;
  if (best == CpuTarget::avx2 && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd")) {
    best = CpuTarget::avx512;
  }
  const char* wanted = std::getenv("CKPTFUSED_CPU_TARGET");
  if (wanted != nullptr && std::strcmp(wanted, "baseline") == 0) return CpuTarget::baseline;
  if (wanted != nullptr && std::strcmp(wanted, "avx2") == 0 && best != CpuTarget::baseline) {
    return CpuTarget::avx2;
  }
  return best;
#else
  return CpuTarget::baseline;
#endif
}

}  // namespace

CpuTarget cpu_target() {
  static const CpuTarget target = detect();
  return target;
}

const char* cpu_target_name() {
  switch (cpu_target()) {
    case CpuTarget::avx512:
      return "avx512";
    case CpuTarget::avx2:
      return "avx2";
    default:
      return "baseline";
  }
}

}  // namespace ckptfused
