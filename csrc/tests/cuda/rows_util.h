#pragma once

#include <cstring>
#include <memory>

#include "kernels/cuda/norm.h"
#include "kernels/cuda/qk.h"
#include "kernels/cuda/residual.h"
#include "kernels/cuda/sum_grads.h"
#include "tests/util.h"

// What the tests of the row kernels share.

namespace ckptfused {

// Kernels that stay while there are rows: a block with several rows, and each row a block's last.
constexpr int64_t kOneMultiprocessor = 1, kManyMultiprocessors = int64_t(1) << 31;

// Both steps of a gradient whose parameters' sums are asked for: their partial sums and dweight and
// dbias are both given, or both null.
inline const char* summed(const char* error, DType row, int64_t chunks, int64_t cols,
                          void* dweight_partials, void* dbias_partials, void* dweight,
                          void* dbias) {
  if (error != nullptr) return error;
  std::vector<GradSum> sums;
  const DType acc = row == DType::f64 ? DType::f64 : DType::f32;
  for (const auto& [from, to] :
       {std::pair(dweight_partials, dweight), std::pair(dbias_partials, dbias)}) {
    if (to != nullptr) sums.push_back({from, to, chunks, cols, acc});
  }
  return sum_grads_cuda(sums.data(), int64_t(sums.size()), acc, nullptr);
}
inline const char* norm_bwd_summed(const NormBwd& a, int64_t rows, int64_t chunks,
                                   void* dweight_partials, void* dbias_partials, void* dweight,
                                   void* dbias, void* stream) {
  return summed(norm_bwd_cuda(a, rows, chunks, dweight_partials, dbias_partials, stream), a.r,
                chunks, a.cols, dweight_partials, dbias_partials, dweight, dbias);
}
inline const char* residual_bwd_summed(const ResidualBwd& a, const int64_t* rng_state, int64_t rows,
                                       int64_t chunks, void* dweight_partials, void* dbias_partials,
                                       void* dweight, void* dbias, void* stream) {
  return summed(
      residual_bwd_cuda(a, rng_state, rows, chunks, dweight_partials, dbias_partials, stream), a.r,
      chunks, a.cols, dweight_partials, dbias_partials, dweight, dbias);
}
inline const char* qk_bwd_summed(const QkBwd& a, int64_t tokens, int64_t chunks,
                                 void* dweight_partials, void* dbias_partials, void* dweight,
                                 void* dbias, void* stream) {
  const QkGrads grads{dweight_partials, dbias_partials, chunks};
  return summed(qk_bwd_cuda(a, &grads, tokens, stream), a.dtype, chunks, a.head_dim,
                dweight_partials, dbias_partials, dweight, dbias);
}

// Elements at an address that is a multiple of 16 bytes, or one element behind it. What lies around
// them must stay as it was.
template <typename T>
class Placed {
 public:
  Placed(const std::vector<T>& values, bool aligned)
      : size_(values.size()), first_(kAlign / sizeof(T) + (aligned ? 0 : 1)) {
    // Exactly as large as needed behind, so that a sanitizer of addresses sees a read past the end.
    memory_.reset(static_cast<char*>(std::aligned_alloc(kAlign, bytes())));
    std::memset(memory_.get(), kGuard, bytes());
    if (size_ > 0) std::memcpy(data(), values.data(), size_ * sizeof(T));
  }
  Placed(size_t size, bool aligned) : Placed(std::vector<T>(size), aligned) {}

  T* data() { return reinterpret_cast<T*>(memory_.get()) + first_; }
  std::vector<T> values() { return {data(), data() + size_}; }
  bool guards_untouched() {
    const char* begin = reinterpret_cast<char*>(data());
    const char* end = begin + size_ * sizeof(T);
    for (const char* byte = memory_.get(); byte < memory_.get() + bytes(); ++byte) {
      if ((byte < begin || byte >= end) && *byte != kGuard) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kAlign = 64;
  static constexpr char kGuard = 0x5a;
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  size_t bytes() const { return ((first_ + size_) * sizeof(T) + 2 * kAlign - 1) / kAlign * kAlign; }
  size_t size_, first_;
  std::unique_ptr<char, Free> memory_;
};

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// A norm's parameter in some dtype, with the doubles that it stands for.
struct Param {
  std::vector<double> exact;
  Values<double> f64;
  Values<float> f32;
  Values<bf16> half_b;
  Values<f16> half;
  NormParam param;

  Param(DType dtype, int64_t n, uint32_t seed) {
    const auto use = [&](auto& values, auto made) {
      values = std::move(made);
      exact = values.exact;
      param = {values.stored.data(), dtype};
    };
    if (dtype == DType::f64) use(f64, random_values<double>(n, seed));
    if (dtype == DType::f32) use(f32, random_values<float>(n, seed));
    if (dtype == DType::bf16) use(half_b, random_values<bf16>(n, seed));
    if (dtype == DType::f16) use(half, random_values<f16>(n, seed));
  }
  Param(const Param&) = delete;

  // What xhat is multiplied by.
  std::vector<double> gain(NormKind kind) const {
    std::vector<double> g = exact;
    for (double& v : g) v += kind == NormKind::gemma ? 1 : 0;
    return g;
  }
};

// Widths of every path: less than a group, whole and broken groups, one warp and several, and rows
// too wide for registers.
inline std::vector<int64_t> cuda_widths() {
  if (kThreadSanitizer) return {7, 520, 2049};
  std::vector<int64_t> widths = odd_widths();
  widths.insert(widths.end(), {2056, 8200, 16392});
  return widths;
}

// Type pairs under ThreadSanitizer: one is enough to see the barriers.
using CudaTypePairs =
    std::conditional_t<kThreadSanitizer, testing::Types<TypePair<float, bf16>>, TypePairs>;

inline double cuda_terms(int64_t n) {
  return 24 + double(n) / 16;
}

}  // namespace ckptfused
