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
// Plain loops over the CKPT_HD maths are vectorised by the compiler for that target.
#include "kernels/cpu/target.h"

#if CKPT_HAS_X86_TARGETS
#define CKPT_TARGET avx512
CKPT_PUSH_TARGET_AVX512
#include CKPT_KERNEL_FILE
CKPT_POP_TARGET
#undef CKPT_TARGET

#define CKPT_TARGET avx2
CKPT_PUSH_TARGET_AVX2
#include CKPT_KERNEL_FILE
CKPT_POP_TARGET
#undef CKPT_TARGET
#endif

#define CKPT_TARGET baseline
#include CKPT_KERNEL_FILE
#undef CKPT_TARGET
#undef CKPT_KERNEL_FILE
