#pragma once

#if defined(__linux__)
extern "C" int MKL_Set_Num_Threads_Local(int) __attribute__((weak));
#endif

namespace ckptfused {

// While one lives, matrix products of its thread run on that thread alone. PyTorch turns MKL's
// dynamic threading off, so that inside a parallel region MKL still splits a product for as many
// threads as there are, without having them, and its bits depend on their number. Other libraries
// see the parallel region and need no telling.
class SerialProducts {
 public:
#if defined(__linux__)
  SerialProducts() {
    if (MKL_Set_Num_Threads_Local != nullptr) previous_ = MKL_Set_Num_Threads_Local(1);
  }
  ~SerialProducts() {
    if (MKL_Set_Num_Threads_Local != nullptr) MKL_Set_Num_Threads_Local(previous_);
  }
#else
  SerialProducts() {}
#endif
  SerialProducts(const SerialProducts&) = delete;
  SerialProducts& operator=(const SerialProducts&) = delete;

 private:
  [[maybe_unused]] int previous_ = 0;
};

}  // namespace ckptfused
