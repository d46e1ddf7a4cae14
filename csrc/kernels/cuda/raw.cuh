#pragma once

#include "kernels/cuda/group.cuh"

#if defined(__CUDACC__)
#define CKPT_NO_UNROLL _Pragma("unroll 1")
#else
#define CKPT_NO_UNROLL
#endif

namespace ckptfused {

// kCount elements of T as they were loaded, in 32-bit words. Loading and converting are two steps,
// so that several loads are under way before the first result is waited for: what a branch does
// with a loaded value it must wait for, and whether 16 bytes are read at once is a branch.
template <typename T, int kCount>
struct Raw {
  static constexpr int kWords = kCount * int(sizeof(T)) / 4;
  uint32_t word[kWords];

  // The first `count` elements from `from`, zeros behind them. vectors: the address is a multiple
  // of 16 bytes; only a full set is read so.
  CKPT_HD void load(const T* from, int count, bool vectors) {
    if (vectors && count == kCount) {
      read(from);
    } else {
      CKPT_UNROLL
      for (int i = 0; i < kWords; ++i) word[i] = 0;
      CKPT_UNROLL
      for (int i = 0; i < kCount; ++i) {
        if (i < count) put(i, from[i]);
      }
    }
  }

  // Likewise all of them or, where they are not wanted, zeros. The address is a multiple of 16
  // bytes.
  CKPT_HD void load_whole(const T* from, bool wanted) {
    CKPT_UNROLL
    for (int i = 0; i < kWords; ++i) word[i] = 0;
    if (wanted) read(from);
  }

  CKPT_HD void unpack(acc_t<T>* out) const {
    CKPT_UNROLL
    for (int i = 0; i < kCount; ++i) out[i] = to_acc(get(i));
  }
  CKPT_HD void pack(const acc_t<T>* in) {
    CKPT_UNROLL
    for (int i = 0; i < kWords; ++i) word[i] = 0;
    CKPT_UNROLL
    for (int i = 0; i < kCount; ++i) {
      T x;
      from_acc(in[i], x);
      put(i, x);
    }
  }

  // 16 bytes at a time: the address is a multiple of that.
  CKPT_HD void store_whole(T* to) const {
    CKPT_UNROLL
    for (int i = 0; i < kWords / 4; ++i) {
      st_global_v4(to + i * 16 / int(sizeof(T)), word + 4 * i);
    }
  }

 private:
  // All of them.
  CKPT_HD void read(const T* from) {
    static_assert(kWords % 4 == 0);
    CKPT_UNROLL
    for (int i = 0; i < kWords / 4; ++i) {
      const uint4 words = reinterpret_cast<const uint4*>(from)[i];
      word[4 * i] = words.x;
      word[4 * i + 1] = words.y;
      word[4 * i + 2] = words.z;
      word[4 * i + 3] = words.w;
    }
  }
  CKPT_HD void put(int i, T x) {
    if constexpr (sizeof(T) == 2) {
      word[i / 2] |= uint32_t(x.bits) << (16 * (i % 2));
    } else {
      memcpy(&word[i * int(sizeof(T)) / 4], &x, sizeof x);
    }
  }
  CKPT_HD T get(int i) const {
    if constexpr (sizeof(T) == 2) {
      return T{uint16_t(word[i / 2] >> (16 * (i % 2)))};
    } else {
      T x;
      memcpy(&x, &word[i * int(sizeof(T)) / 4], sizeof x);
      return x;
    }
  }
};

}  // namespace ckptfused
