CKPT_BEGIN_TARGET

// Calls of the generator side by side, of a word 64 bits each: products read the lower half, so
// what comes to lie above it is never cleared.
typedef uint64_t Lanes __attribute__((vector_size(8 * CKPT_LANES)));

#if CKPT_LANES == 8
constexpr Lanes kLane = {0, 1, 2, 3, 4, 5, 6, 7};
CKPT_HD Lanes low_product(Lanes a, uint32_t b) {
  return Lanes(_mm512_maskz_mul_epu32(0xff, __m512i(a), _mm512_set1_epi64(b)));
}
#elif CKPT_LANES == 4
constexpr Lanes kLane = {0, 1, 2, 3};
CKPT_HD Lanes low_product(Lanes a, uint32_t b) {
  return Lanes(_mm256_mul_epu32(__m256i(a), _mm256_set1_epi64x(b)));
}
#elif CKPT_LANES == 2
constexpr Lanes kLane = {0, 1};
CKPT_HD Lanes low_product(Lanes a, uint32_t b) {
  return Lanes(_mm_mul_epu32(__m128i(a), _mm_set1_epi64x(b)));
}
#else
constexpr Lanes kLane = {0};
CKPT_HD Lanes low_product(Lanes a, uint32_t b) {
  return (a & 0xffffffffu) * b;
}
#endif

typedef uint64_t __attribute__((may_alias, aligned(2))) FourDraws;

// philox4x32<7> of counters whose lower half is c0.
CKPT_HD void draw_lanes(const Dropout& dropout, Lanes c0, FourDraws* out) {
  Lanes c1 = c0 >> 32, c2 = Lanes{} + dropout.counter2, c3 = Lanes{} + dropout.counter3;
  uint64_t k0 = dropout.key0, k1 = dropout.key1;
#pragma GCC unroll 7
  for (int round = 0; round < 7; ++round) {
    const Lanes product0 = low_product(c0, kPhiloxFactor0);
    const Lanes product1 = low_product(c2, kPhiloxFactor1);
    c0 = product1 >> 32 ^ c1 ^ k0;
    c2 = product0 >> 32 ^ c3 ^ k1;
    c1 = product1;
    c3 = product0;
    k0 += kPhiloxStep0;
    k1 += kPhiloxStep1;
  }
  const Lanes low = (c0 & 0xffffffffu) | c1 << 32, high = (c2 & 0xffffffffu) | c3 << 32;
  CKPT_IVDEP
  for (int i = 0; i < CKPT_LANES; ++i) {
    out[2 * i] = low[i];
    out[2 * i + 1] = high[i];
  }
}

// The 16-bit draws of columns [col0, col1) of a row, made into buffer: element c's is at [c - col0]
// of what is returned. Eight draws are the four words of one call in memory (little-endian) order.
CKPT_HD const uint16_t* dropout_draws(const Dropout& from, int64_t row, int64_t col0, int64_t col1,
                                      uint16_t* buffer) {
  const Dropout dropout = from;  // in registers, whatever out may be
  FourDraws* out = reinterpret_cast<FourDraws*>(buffer);
  const int64_t group = col0 >> 3;
  int64_t left = ((col1 + 7) >> 3) - group;
  Lanes call = kLane + (uint64_t(row) * uint64_t(dropout.groups_per_row) + uint64_t(group));
  for (; left >= CKPT_LANES; left -= CKPT_LANES, call += CKPT_LANES, out += 2 * CKPT_LANES) {
    draw_lanes(dropout, call, out);
  }
  if (left > 0) {
    FourDraws last[2 * CKPT_LANES];
    draw_lanes(dropout, call, last);
    __builtin_memcpy(out, last, size_t(left) * 16);
  }
  return buffer + (col0 & 7);
}

CKPT_END_TARGET
