#pragma once

// The mechanism behind foreach_target.h: target pragmas, namespaces and the run-time choice.
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define CKPT_HAS_X86_TARGETS 1
#else
#define CKPT_HAS_X86_TARGETS 0
#endif

#define CKPT_BEGIN_TARGET \
  namespace ckptfused {   \
  namespace CKPT_TARGET {
#define CKPT_END_TARGET \
  }                     \
  }

#if CKPT_HAS_X86_TARGETS
// The formatter would split the strings of the pragmas.
// clang-format off
#if defined(__clang__)
#define CKPT_PUSH_TARGET_AVX512 _Pragma("clang attribute push(__attribute__((target(\"avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx2,fma,f16c\"))), apply_to=function)")
#define CKPT_PUSH_TARGET_AVX2 _Pragma("clang attribute push(__attribute__((target(\"avx2,fma,f16c\"))), apply_to=function)")
#define CKPT_POP_TARGET _Pragma("clang attribute pop")
#else
#define CKPT_PUSH_TARGET_AVX512 \
  _Pragma("GCC push_options") \
  _Pragma("GCC target(\"avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx2,fma,f16c,prefer-vector-width=512\")")
#define CKPT_PUSH_TARGET_AVX2 \
  _Pragma("GCC push_options") \
  _Pragma("GCC target(\"avx2,fma,f16c\")")
#define CKPT_POP_TARGET _Pragma("GCC pop_options")
#endif
// clang-format on
#endif

namespace ckptfused {

enum class CpuTarget { baseline, avx2, avx512 };

// The best target that this processor and operating system run; CKPTFUSED_CPU_TARGET
// (baseline|avx2|avx512) lowers it, for tests. Read once.
CpuTarget cpu_target();
const char* cpu_target_name();

}  // namespace ckptfused

#if CKPT_HAS_X86_TARGETS
#define CKPT_DISPATCH(...)                                                                         \
  (::ckptfused::cpu_target() == ::ckptfused::CpuTarget::avx512 ? &::ckptfused::avx512::__VA_ARGS__ \
   : ::ckptfused::cpu_target() == ::ckptfused::CpuTarget::avx2                                     \
       ? &::ckptfused::avx2::__VA_ARGS__                                                           \
       : &::ckptfused::baseline::__VA_ARGS__)
#else
#define CKPT_DISPATCH(...) (&::ckptfused::baseline::__VA_ARGS__)
#endif
