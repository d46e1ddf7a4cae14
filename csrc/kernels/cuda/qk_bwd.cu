#include "kernels/cuda/partials.cuh"
#include "kernels/cuda/qk.cuh"
#include "kernels/cuda/qk.h"
#include "kernels/cuda/types.cuh"

namespace ckptfused {
namespace {

constexpr int kSteps = 4;  // items that a team takes one after the other, where no sum is wanted

// A block's sum over its teams, in their order, of what their lanes hold: row blockIdx.x of
// partials.
template <typename A>
__device__ __forceinline__ void store_partial(const QkShape& a, const QkGrid& grid,
                                              const HeadUnit& unit, const A* sums, A* partials) {
  __shared__ A shared[kQkThreads * kUnit];
  if (partials == nullptr) return;  // alike for all threads
  const int thread = int(threadIdx.x), lane = thread % grid.lanes, team = thread / grid.lanes;
  __syncthreads();  // the last sum has been read
  CKPT_UNROLL
  for (int i = 0; i < kUnit; ++i) shared[i * kQkThreads + thread] = sums[i];
  __syncthreads();
  for (int i = team; i < kUnit; i += grid.teams()) {
    const bool second = i >= kGroup;
    const int j = i % kGroup;
    if (j >= (second ? unit.count[1] : unit.count[0])) continue;
    A sum = 0;
    for (int t = 0; t < grid.teams(); ++t) sum += shared[i * kQkThreads + t * grid.lanes + lane];
    const int col = (second ? unit.first[1] : unit.first[0]) + j;
    partials[int64_t(blockIdx.x) * a.head_dim + col] = sum;
  }
}

// With a norm, dweight and dbias (null: not wanted) are the partial sums [gridDim.x, head_dim].
template <typename T, bool kNorm>
__global__ void __launch_bounds__(kQkThreads, sizeof(T) == 8 ? 1 : 4)
    qk_bwd_kernel(QkBwd a, QkGrid grid, acc_t<T>* dweight, acc_t<T>* dbias) {
  using A = acc_t<T>;
  constexpr int kAtOnce = kHeadsAtOnce<T, kNorm>;
  const HeadUnit unit = head_unit(a, int(threadIdx.x) % grid.lanes);
  const A inverse_dim = A(1) / A(a.head_dim);
  A weight[kUnit], dw[kUnit] = {}, db[kUnit] = {};
  if constexpr (kNorm) load_unit_gain(a, unit, weight);
  const int64_t begin = int64_t(blockIdx.x) * grid.chunk;
  int64_t index = begin + int(threadIdx.x) / grid.lanes;
  const int64_t end = begin + grid.chunk < grid.items ? begin + grid.chunk : grid.items;
  QkCursor cursor(a, grid, index);
  CKPT_NO_UNROLL
  for (int64_t done = 0; done < grid.chunk; done += grid.teams()) {
    const int64_t head = cursor.item * kAtOnce;
    const int64_t heads = index < end ? a.heads - head : 0;
    RawUnit<T> raw_dy[kAtOnce], raw_x[kAtOnce];
    CKPT_UNROLL
    for (int h = 0; h < kAtOnce; ++h) {
      raw_dy[h].load(head_at<const T>(a.dy, cursor, head + h), unit, h < heads, grid.vectors);
      if constexpr (kNorm) {
        raw_x[h].load(head_at<const T>(a.x, cursor, head + h), unit, h < heads, grid.vectors);
      }
    }
    RawAngles<A> angles;
    angles.load(a, grid, unit, cursor, heads > 0);
    const Rotation<A> rotation(angles, A(-1));
    CKPT_UNROLL
    for (int h = 0; h < kAtOnce; ++h) {
      A g[kUnit];
      raw_dy[h].unpack(g);
      rotation.apply(a, unit, g);
      if constexpr (kNorm) {
        A xhat[kUnit];
        raw_x[h].unpack(xhat);
        const NormStats<A> stats = head_stats(a, grid, unit, inverse_dim, xhat);
        A sum_g = 0, sum_gx = 0;
        CKPT_UNROLL
        for (int i = 0; i < kUnit; ++i) {
          xhat[i] = normalised(xhat[i], stats);
          // Lanes without a head, or a column, hold zeros; xhat may be anything there.
          if (i % kGroup >= unit.count[i / kGroup] || h >= heads) xhat[i] = 0;
          dw[i] = std::fma(g[i], xhat[i], dw[i]);
          db[i] += g[i];
          g[i] *= weight[i];
          sum_g += g[i];
          sum_gx = std::fma(g[i], xhat[i], sum_gx);
        }
        const A mean_gx = team_sum(sum_gx, grid.lanes) * inverse_dim;
        A mean_g = 0;
        if (norm_is_centred(a.norm)) mean_g = team_sum(sum_g, grid.lanes) * inverse_dim;
        CKPT_UNROLL
        for (int i = 0; i < kUnit; ++i) {
          g[i] = norm_input_grad(g[i], xhat[i], stats.rstd, mean_g, mean_gx);
        }
      }
      store_unit(g, unit, h < heads, grid.vectors, head_at<T>(a.dx, cursor, head + h));
    }
    index += grid.teams();
    cursor.step(a, grid);
  }
  if constexpr (kNorm) {
    store_partial(a, grid, unit, dw, dweight);
    store_partial(a, grid, unit, db, dbias);
  }
}

template <typename T, bool kNorm>
const char* qk_bwd_launch(const QkBwd& a, int64_t tokens, int64_t chunks, void* dweight_partials,
                          void* dbias_partials, void* dweight, void* dbias, void* stream) {
  using A = acc_t<T>;
  QkGrid grid;
  if (!set_qk_grid<T, kHeadsAtOnce<T, kNorm>>(a, tokens, grid)) return kHeadTooWide;
  const bool sums = kNorm && (dweight_partials != nullptr || dbias_partials != nullptr);
  if (grid.items == 0 && !sums) return nullptr;
  grid.vectors = grid.vectors && whole_vectors<T>(a.dy) && whole_vectors<T>(a.dx) &&
                 (!kNorm || whole_vectors<T>(a.x));
  grid.chunk = int64_t(grid.teams()) * kSteps;
  if (sums) grid.chunk = (grid.items + chunks - 1) / chunks;
  const int64_t blocks = sums ? chunks : (grid.items + grid.chunk - 1) / grid.chunk;
  const char* error =
      launch(qk_bwd_kernel<T, kNorm>, grid_of(blocks), dim3(kQkThreads), stream, a, grid,
             static_cast<A*>(dweight_partials), static_cast<A*>(dbias_partials));
  if (error != nullptr || !sums) return error;
  return sum_partials_cuda<A>(dweight_partials, dbias_partials, chunks, a.head_dim, dweight, dbias,
                              stream);
}

}  // namespace

const char* qk_bwd_cuda(const QkBwd& a, int64_t tokens, int64_t chunks, void* dweight_partials,
                        void* dbias_partials, void* dweight, void* dbias, void* stream) {
  return for_type(a.dtype, [&](auto t) {
    using T = decltype(t);
    return a.norm == NormKind::none
               ? qk_bwd_launch<T, false>(a, tokens, chunks, nullptr, nullptr, nullptr, nullptr,
                                         stream)
               : qk_bwd_launch<T, true>(a, tokens, chunks, dweight_partials, dbias_partials,
                                        dweight, dbias, stream);
  });
}

}  // namespace ckptfused
