#include "kernels/cuda/rng.h"

#include <gtest/gtest.h>

namespace ckptfused {
namespace {

TEST(RngStateCuda, FromTheHost) {
  PhiloxSource from;
  from.seed = 0xfedcba9876543210ull;
  from.offset = (uint64_t(1) << 40) + 3;
  from.offset_intragraph = 7;  // means nothing outside a graph
  int64_t state[2] = {};
  ASSERT_EQ(nullptr, rng_state_cuda(from, state, nullptr));
  EXPECT_EQ(uint64_t(state[0]), from.seed);
  EXPECT_EQ(uint64_t(state[1]), from.offset);
}

TEST(RngStateCuda, FromACapturedGraph) {
  int64_t seed = -5, offset = int64_t(1) << 33;
  PhiloxSource from;
  from.captured = true;
  from.seed_ptr = &seed;
  from.offset_ptr = &offset;
  from.offset_intragraph = 0xfffffffcu;
  int64_t state[2] = {};
  ASSERT_EQ(nullptr, rng_state_cuda(from, state, nullptr));
  EXPECT_EQ(state[0], seed);
  EXPECT_EQ(state[1], offset + 0xfffffffcll);
}

}  // namespace
}  // namespace ckptfused
