// Compiles one kernel file for several instruction sets and picks the best at run time.
//
//   // norm.cpp
//   #include "kernels/cpu/norm.h"
//   #define CKPT_KERNEL_FILE "kernels/cpu/norm.inl"
//   #include "kernels/cpu/foreach_target.h"
//   void norm_fwd(const NormFwd& a, int64_t begin, int64_t end) {
//     CKPT_DISPATCH(norm_fwd_rows)(a, begin, end);
//   }
//
// norm.inl defines norm_fwd_rows between CKPT_BEGIN_TARGET and CKPT_END_TARGET, which open and
// close the namespace of the target; it includes nothing (norm.cpp includes what it needs first).
// Plain loops over the CKPT_HD maths are vectorised by the compiler for that target. The draws of
// dropout (draws.inl) are there for each, by the instruction that multiplies lower halves.
#include "kernels/cpu/rows.h"
#include "kernels/cpu/target.h"

#if CKPT_HAS_X86_TARGETS
#include <immintrin.h>

#define CKPT_TARGET avx512
#define CKPT_LANES 8
CKPT_PUSH_TARGET_AVX512
#include "kernels/cpu/draws.inl"
#include CKPT_KERNEL_FILE
CKPT_POP_TARGET
#undef CKPT_LANES
#undef CKPT_TARGET

#define CKPT_TARGET avx2
#define CKPT_LANES 4
CKPT_PUSH_TARGET_AVX2
#include "kernels/cpu/draws.inl"
#include CKPT_KERNEL_FILE
CKPT_POP_TARGET
#undef CKPT_LANES
#undef CKPT_TARGET
#endif

#define CKPT_TARGET baseline
#if CKPT_HAS_X86_TARGETS
#define CKPT_LANES 2
#else
#define CKPT_LANES 1
#endif
#include "kernels/cpu/draws.inl"
#include CKPT_KERNEL_FILE
#undef CKPT_LANES
#undef CKPT_TARGET
#undef CKPT_KERNEL_FILE
