#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/cuda/launch.cuh"
#include "math/dropout.h"
#include "math/types.h"

// Every kernel on rows hands out columns in groups of eight: one Philox call, and 16 bytes of a
// 16-bit type. Which thread owns which group depends on the width alone, never on alignment, so
// that sums over a row have the same order, and the same bits, wherever the row lies.

#if defined(__CUDACC__)
#define CKPT_UNROLL _Pragma("unroll")
#else
#define CKPT_UNROLL
#endif

namespace ckptfused {

constexpr int kGroup = 8;

// Whether rows of T that start at data and lie stride elements apart can be read 16 bytes at a
// time. A null pointer can: nobody reads it.
template <typename T>
CKPT_HD bool whole_vectors(const void* data, int64_t stride) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride * int64_t(sizeof(T)) % 16 == 0;
}

// out = the first `count` (0 to 8) of eight elements, zeros behind them. vectors: the address is a
// multiple of 16 bytes; only a full group is read so. Raw (raw.cuh) does it in two steps.
template <typename T>
CKPT_HD void load_group(const T* from, int count, bool vectors, acc_t<T>* out) {
  if (vectors && count == kGroup) {
    T raw[kGroup];
    CKPT_UNROLL
    for (int i = 0; i < kGroup * int(sizeof(T)) / int(sizeof(uint4)); ++i) {
      const uint4 words = reinterpret_cast<const uint4*>(from)[i];
      memcpy(reinterpret_cast<char*>(raw) + i * sizeof(uint4), &words, sizeof words);
    }
    CKPT_UNROLL
    for (int i = 0; i < kGroup; ++i) out[i] = to_acc(raw[i]);
  } else {
    CKPT_UNROLL
    for (int i = 0; i < kGroup; ++i) out[i] = i < count ? to_acc(from[i]) : acc_t<T>(0);
  }
}

template <typename T, typename A>
CKPT_HD void store_group(const A* in, int count, bool vectors, T* to) {
  if (vectors && count == kGroup) {
    T raw[kGroup];
    CKPT_UNROLL
    for (int i = 0; i < kGroup; ++i) from_acc(in[i], raw[i]);
    CKPT_UNROLL
    for (int i = 0; i < kGroup * int(sizeof(T)) / int(sizeof(uint4)); ++i) {
      uint4 words;
      memcpy(&words, reinterpret_cast<const char*>(raw) + i * sizeof(uint4), sizeof words);
      reinterpret_cast<uint4*>(to)[i] = words;
    }
  } else {
    CKPT_UNROLL
    for (int i = 0; i < kGroup; ++i) {
      if (i < count) from_acc(in[i], to[i]);
    }
  }
}

}  // namespace ckptfused
