#pragma once

#if defined(_OPENMP)
#include <omp.h>
#endif

#if defined(__linux__)
extern "C" int MKL_Set_Num_Threads_Local(int) __attribute__((weak));
#endif

namespace ckptfused {

// While one lives, what its thread starts in parallel, matrix products among it, has that many
// threads. Of this thread alone, unlike at::set_num_threads, which also says how many threads
// started later take. MKL is told by itself: PyTorch turns its dynamic threading off, so that
// inside a parallel region it would still split a product for as many threads as there are, without
// having them, and its bits depend on their number.
class ThreadsGuard {
 public:
  explicit ThreadsGuard(int threads) {
#if defined(_OPENMP)
    openmp_ = omp_get_max_threads();
    omp_set_num_threads(threads);
#endif
#if defined(__linux__)
    if (MKL_Set_Num_Threads_Local != nullptr) mkl_ = MKL_Set_Num_Threads_Local(threads);
#endif
    (void)threads;
  }
  ~ThreadsGuard() {
#if defined(_OPENMP)
    omp_set_num_threads(openmp_);
#endif
#if defined(__linux__)
    if (MKL_Set_Num_Threads_Local != nullptr) MKL_Set_Num_Threads_Local(mkl_);
#endif
  }
  ThreadsGuard(const ThreadsGuard&) = delete;
  ThreadsGuard& operator=(const ThreadsGuard&) = delete;

 private:
  [[maybe_unused]] int openmp_ = 1, mkl_ = 0;
};

}  // namespace ckptfused
