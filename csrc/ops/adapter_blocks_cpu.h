#pragma once

#include "ops/torch.h"

#include <algorithm>

#include "kernels/cpu/adapter.h"
#include "ops/adapters.h"
#include "ops/checks.h"
#include "ops/row_args.h"
#include "ops/tasks_cpu.h"

// What forward and backward of adapters on the CPU share: a task takes blocks of rows, of which
// the input is widened once and every product stays in the core's cache.

namespace ckptfused::adapter_blocks {

using namespace tiles;

// Rows of a block: their float32 copy, 1024 to 4096 wide, fits a core's cache beside a and b, and a
// product of rank 16 takes ten times as long as its call.
constexpr int64_t kRows = 128;
// Columns of y taken at a time.
constexpr int64_t kCols = 1024;

// Scratch of a thread.
template <typename A>
struct Scratch {
  A *x = nullptr, *dx = nullptr, *t, *dt = nullptr, *y;

  Scratch(Pieces& pieces, const AdapterSizes& s) {
    const int64_t rows = std::min(kRows, s.n);
    if (!s.backward || s.needs_in) x = pieces.take<A>(rows * s.k);
    if (s.din) dx = pieces.take<A>(rows * s.k);
    t = pieces.take<A>(rows * s.ranks);
    if (s.backward) dt = pieces.take<A>(rows * s.ranks);
    y = pieces.take<A>(rows * std::min(kCols, s.m));
  }
};

template <typename A>
int64_t thread_bytes(const AdapterSizes& s) {
  Pieces pieces(nullptr);
  Scratch<A>(pieces, s);
  return pieces.bytes();
}

template <typename A>
Matrix<A> matrix_of(const at::Tensor& t) {
  A* data = const_cast<A*>(static_cast<const A*>(t.const_data_ptr()));
  if (t.stride(1) == 1 || t.size(1) == 1) return {data, t.size(0), t.size(1), t.stride(0)};
  return {data, t.size(0), t.size(1), t.stride(1), true};
}

// Rows [row, row + rows) of a matrix.
template <typename A>
Matrix<A> rows_of(const Matrix<A>& m, int64_t row, int64_t rows) {
  return {m.data + row * (m.transposed ? 1 : m.stride), rows, m.cols, m.stride, m.transposed};
}

// One adapter's operands in the accumulation type, and its dropout with the state of the call.
template <typename A>
struct Operands {
  at::Tensor a_copy, b_copy, bias_copy;
  Matrix<A> a, b;
  const A* bias = nullptr;
  A scale;
  int64_t rank, rank0;  // rank0: sum of the ranks before
  Dropout dropout;
};

template <typename A>
std::vector<Operands<A>> operands_of(const Adapters& adapters, const AdapterPlace& place) {
  constexpr at::ScalarType type = at::CppTypeToScalarType<A>::value;
  std::vector<Operands<A>> list;
  int64_t rank0 = 0;
  for (const Adapter& adapter : adapters) {
    Operands<A> o;
    o.a_copy = adapter.a.to(type);
    o.b_copy = adapter.b.to(type);
    o.a = matrix_of<A>(o.a_copy);
    o.b = matrix_of<A>(o.b_copy);
    if (adapter.bias.defined()) {
      o.bias_copy = adapter.bias.to(type).contiguous();
      o.bias = static_cast<const A*>(o.bias_copy.const_data_ptr());
    }
    o.scale = A(adapter.scale);
    o.rank = adapter.a.size(0);
    o.rank0 = rank0;
    rank0 += o.rank;
    if (adapter.p > 0 && !counting()) {
      check_rng_state("adapter", place.rng, at::kCPU);
      o.dropout = make_dropout(place.rng.const_data_ptr<int64_t>(), adapter.p, int(adapter.site),
                               place.cols);
    }
    list.push_back(std::move(o));
  }
  return list;
}

template <typename T>
struct Rows {
  T* data = nullptr;
  int64_t stride = 0;

  explicit Rows(const at::Tensor& t) {
    if (!t.defined()) return;
    data = const_cast<T*>(static_cast<const T*>(t.const_data_ptr()));
    stride = t.stride(0);
  }
  T* at(int64_t row, int64_t col) const { return data + row * stride + col; }
};

// What the blocks of a call share.
template <typename T>
struct Call {
  using A = acc_t<T>;
  std::vector<Operands<A>> adapters;
  RowMap row_map;
  int64_t row0, col0, k, m;

  Call(const Adapters& list, const AdapterPlace& place, int64_t width)
      : adapters(operands_of<A>(list, place)),
        row_map(ckptfused::row_map(place.rows)),
        row0(place.row0),
        col0(place.col0),
        k(list[0].a.size(1)),
        m(width) {}
  AdapterBlock block(int64_t row, int64_t rows, const Dropout& dropout) const {
    return {rows, k, dropout, row_map, row0 + row, col0};
  }
};

// A thread's rows of the input, dropped as the adapter at hand wants it.
template <typename T>
class Input {
 public:
  using A = acc_t<T>;
  Input(const Call<T>& call, const Rows<T>& in, A* buffer)
      : call_(call), in_(in), buffer_(buffer) {}

  Matrix<A> load(int64_t row, int64_t rows, const Operands<A>& adapter) {
    const Operands<A>* like = adapter.dropout.active() ? &adapter : nullptr;
    if (row != row_ || like != like_) {
      adapter_load_rows(call_.block(row, rows, adapter.dropout), in_.at(row, 0), in_.stride,
                        buffer_);
      row_ = row;
      like_ = like;
    }
    return {buffer_, rows, call_.k, call_.k};
  }

 private:
  const Call<T>& call_;
  const Rows<T>& in_;
  A* buffer_;
  int64_t row_ = -1;
  const Operands<A>* like_ = nullptr;
};

template <typename A>
Matrix<A> low_rank(A* buffer, int64_t rows, const Operands<A>& adapter) {
  return {buffer + rows * adapter.rank0, rows, adapter.rank, adapter.rank};
}

inline AdapterSizes sizes_of(int64_t n, int64_t m, const Adapters& adapters, bool backward,
                             bool din) {
  AdapterSizes s{n, adapters[0].a.size(1), m, 0, backward, din};
  for (const Adapter& adapter : adapters) {
    s.ranks += adapter.a.size(0);
    s.needs_in |= adapter.da.defined() || adapter.db.defined();
  }
  return s;
}

}  // namespace ckptfused::adapter_blocks
