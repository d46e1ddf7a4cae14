#include "kernels/cpu/threads.h"

#include <gtest/gtest.h>

#include <thread>

// Stands in for the library's: what it was told in this thread.
static thread_local int mkl_threads = 0;
extern "C" int MKL_Set_Num_Threads_Local(int threads) {
  const int previous = mkl_threads;
  mkl_threads = threads;
  return previous;
}

namespace ckptfused {
namespace {

#if defined(_OPENMP)
TEST(ThreadsGuard, HoldsForItsThreadAloneAndIsTakenBack) {
  omp_set_num_threads(3);
  MKL_Set_Num_Threads_Local(4);
  {
    const ThreadsGuard guard(1);
    EXPECT_EQ(omp_get_max_threads(), 1);
    EXPECT_EQ(mkl_threads, 1);
    int other = 0;
    std::thread([&] { other = mkl_threads; }).join();
    EXPECT_EQ(other, 0);
  }
  EXPECT_EQ(omp_get_max_threads(), 3);
  EXPECT_EQ(mkl_threads, 4);
}

TEST(ThreadsGuard, InAParallelRegion) {
  omp_set_num_threads(2);
  int wrong = 0;
#pragma omp parallel reduction(+ : wrong)
  {
    const int before = omp_get_max_threads();
    {
      const ThreadsGuard guard(1);
      wrong += omp_get_max_threads() != 1 || mkl_threads != 1;
    }
    wrong += omp_get_max_threads() != before || mkl_threads == 1;
  }
  EXPECT_EQ(wrong, 0);
}
#endif

}  // namespace
}  // namespace ckptfused
