#pragma once

#include <cstdint>

#include "math/macros.h"

namespace ckptfused {

// Factors of a round, and what is added to the keys after it.
constexpr uint32_t kPhiloxFactor0 = 0xD2511F53u, kPhiloxFactor1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxStep0 = 0x9E3779B9u, kPhiloxStep1 = 0xBB67AE85u;

// Philox4x32 counter-based generator (Salmon et al. 2011, "Parallel random numbers: as easy as
// 1, 2, 3"). Seven rounds are the fewest that pass BigCrush with a margin; PyTorch uses ten, so
// the two never share a stream.
struct Philox4x32 {
  uint32_t word[4];
};

template <int kRounds = 7>
CKPT_HD Philox4x32 philox4x32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0,
                              uint32_t k1) {
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t product0 = uint64_t(kPhiloxFactor0) * c0;
    const uint64_t product1 = uint64_t(kPhiloxFactor1) * c2;
    c0 = uint32_t(product1 >> 32) ^ c1 ^ k0;
    c1 = uint32_t(product1);
    c2 = uint32_t(product0 >> 32) ^ c3 ^ k1;
    c3 = uint32_t(product0);
    k0 += kPhiloxStep0;
    k1 += kPhiloxStep1;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace ckptfused
