#include "ops/torch.h"

#include "ops/adapter_blocks_cpu.h"

namespace ckptfused {
namespace {

using namespace adapter_blocks;

template <typename T>
void forward_block(const Call<T>& call, const Rows<T>& y, const Rows<T>& in, int64_t row,
                   int64_t rows, const Scratch<acc_t<T>>& scratch) {
  using A = acc_t<T>;
  Input<T> input(call, in, scratch.x);
  for (const Operands<A>& o : call.adapters) {
    product(low_rank(scratch.t, rows, o), input.load(row, rows, o), o.a.t(), 1.0, 0.0);
  }
  for (int64_t col = 0; col < call.m; col += kCols) {
    const int64_t cols = std::min(kCols, call.m - col);
    const Matrix<A> sum{scratch.y, rows, cols, cols};
    double beta = 0.0;
    for (const Operands<A>& o : call.adapters) {
      product(sum, low_rank(scratch.t, rows, o), rows_of(o.b, col, cols).t(), o.scale, beta);
      beta = 1.0;
      if (o.bias == nullptr) continue;
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < cols; ++c) sum.data[r * cols + c] += o.scale * o.bias[col + c];
      }
    }
    adapter_add_rows<T>({rows, cols}, sum.data, y.at(row, col), y.stride);
  }
}

}  // namespace

void adapters_fwd_cpu(const at::Tensor& y, const at::Tensor& in, const Adapters& adapters,
                      const AdapterPlace& place) {
  if (adapters.empty() || y.numel() == 0) return;
  for_dtype(y.scalar_type(), [&](auto type) {
    using T = decltype(type);
    using A = acc_t<T>;
    const int64_t n = y.size(0);
    const AdapterSizes s = sizes_of(n, y.size(1), adapters, false, false);
    const Call<T> call(adapters, place, s.m);
    const Rows<T> y_rows(y), in_rows(in);
    run_tasks((n + kRows - 1) / kRows, thread_bytes<A>(s), [&](int64_t task, char* memory) {
      Pieces pieces(memory);
      const Scratch<A> scratch(pieces, s);
      const int64_t row = task * kRows;
      forward_block(call, y_rows, in_rows, row, std::min(kRows, n - row), scratch);
    });
  });
}

}  // namespace ckptfused
