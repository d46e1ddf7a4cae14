#include "ops/torch.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/adapter.h"
#include "ops/adapters.h"
#include "ops/checks.h"
#include "ops/tasks_cpu.h"

namespace ckptfused {
namespace {

using namespace tiles;

// Rows of a block: their float32 copy, 1024 to 4096 wide, fits a core's cache beside a and b, and a
// product of rank 16 takes ten times as long as its call.
constexpr int64_t kRows = 128;
// Columns of y taken at a time.
constexpr int64_t kCols = 1024;
// A backward adds up row ranges of their own, so many that the sums cost little beside the rest.
constexpr int64_t kMostRanges = 16;

struct Ranges {
  explicit Ranges(int64_t n) {
    const int64_t even = (n + kMostRanges - 1) / kMostRanges;
    rows = std::max<int64_t>(2 * kRows, (even + kRows - 1) / kRows * kRows);
    count = (n + rows - 1) / rows;
  }
  int64_t rows, count;
};

int64_t whole_lines(int64_t elements) {
  return (elements + 15) / 16 * 16;
}

// Elements of one range's sums.
int64_t sums_size(const AdapterSizes& s) {
  return whole_lines(s.da_ranks * s.k + s.db_ranks * s.m + s.dbiases * s.m);
}

template <typename A>
struct Scratch {
  A *x, *dx = nullptr, *t, *dt = nullptr, *y;

  Scratch(Pieces& pieces, const AdapterSizes& s) {
    const int64_t rows = std::min(kRows, s.n);
    x = pieces.take<A>(rows * s.k);
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
  A* data = t.defined() ? const_cast<A*>(static_cast<const A*>(t.const_data_ptr())) : nullptr;
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
    if (adapter.p > 0) {
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
        row0(place.row0),
        col0(place.col0),
        k(list[0].a.size(1)),
        m(width) {
    if (!place.rows.empty()) row_map = {place.rows[1], place.rows[0]};
  }
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

// The sums of one range of rows, a part for each gradient that is asked for.
template <typename A>
struct Sums {
  std::vector<A*> da, db, dbias;

  Sums(const Adapters& adapters, const AdapterSizes& s, A* next) {
    const auto take = [&](bool wanted, int64_t size) {
      A* piece = wanted ? next : nullptr;
      if (wanted) next += size;
      return piece;
    };
    for (const Adapter& adapter : adapters) {
      const int64_t rank = adapter.a.size(0);
      da.push_back(take(adapter.da.defined(), rank * s.k));
      db.push_back(take(adapter.db.defined(), rank * s.m));
      dbias.push_back(take(adapter.dbias.defined(), s.m));
    }
  }
};

// dt = scale * dy b, and what the gradients of b and the bias are sums of.
template <typename T>
void backward_outputs(const Call<T>& call, const Rows<T>& dy, int64_t row, int64_t rows,
                      const Sums<acc_t<T>>& sums, bool need_dt, const Scratch<acc_t<T>>& scratch) {
  using A = acc_t<T>;
  for (int64_t col = 0; col < call.m; col += kCols) {
    const int64_t cols = std::min(kCols, call.m - col);
    adapter_load_rows<T>({rows, cols}, dy.at(row, col), dy.stride, scratch.y);
    const Matrix<A> d{scratch.y, rows, cols, cols};
    for (size_t i = 0; i < call.adapters.size(); ++i) {
      const Operands<A>& o = call.adapters[i];
      if (need_dt) {
        product(low_rank(scratch.dt, rows, o), d, rows_of(o.b, col, cols), o.scale,
                col == 0 ? 0.0 : 1.0);
      }
      if (sums.db[i] != nullptr) {
        product({sums.db[i] + col * o.rank, cols, o.rank, o.rank}, d.t(),
                low_rank(scratch.t, rows, o), o.scale, 1.0);
      }
      if (sums.dbias[i] != nullptr) {
        adapter_sum_rows(rows, cols, d.data, o.scale, sums.dbias[i] + col);
      }
    }
  }
}

template <typename T, typename D>
void backward_block(const Call<T>& call, const Rows<T>& dy, const Rows<T>& in, const Rows<D>& din,
                    int64_t row, int64_t rows, const Sums<acc_t<T>>& sums,
                    const Scratch<acc_t<T>>& scratch) {
  using A = acc_t<T>;
  const std::vector<Operands<A>>& adapters = call.adapters;
  Input<T> input(call, in, scratch.x);
  bool need_dt = din.data != nullptr;
  for (size_t i = 0; i < adapters.size(); ++i) {
    need_dt = need_dt || sums.da[i] != nullptr;
    if (sums.db[i] == nullptr) continue;
    const Operands<A>& o = adapters[i];
    product(low_rank(scratch.t, rows, o), input.load(row, rows, o), o.a.t(), 1.0, 0.0);
  }
  backward_outputs(call, dy, row, rows, sums, need_dt, scratch);
  for (size_t i = 0; i < adapters.size(); ++i) {
    const Operands<A>& o = adapters[i];
    const Matrix<A> dt = low_rank(scratch.dt, rows, o);
    if (sums.da[i] != nullptr) {
      product({sums.da[i], o.rank, call.k, call.k}, dt.t(), input.load(row, rows, o), 1.0, 1.0);
    }
    if (din.data == nullptr) continue;
    product({scratch.dx, rows, call.k, call.k}, dt, o.a, 1.0, 0.0);
    adapter_add_rows<D>(call.block(row, rows, o.dropout), scratch.dx, din.at(row, 0), din.stride);
  }
}

AdapterSizes sizes_of(int64_t n, int64_t m, const Adapters& adapters, bool backward, bool din) {
  AdapterSizes s{n, adapters[0].a.size(1), m, 0, backward, din};
  for (const Adapter& adapter : adapters) {
    const int64_t rank = adapter.a.size(0);
    s.ranks += rank;
    if (adapter.da.defined()) s.da_ranks += rank;
    if (adapter.db.defined()) s.db_ranks += rank;
    if (adapter.dbias.defined()) s.dbiases += 1;
  }
  return s;
}

// Adds the ranges' sums to the gradients, in the order of the ranges.
template <typename A>
void add_sums(const Adapters& adapters, const AdapterSizes& s, const Ranges& ranges, A* memory) {
  const Sums<A> first(adapters, s, memory);
  const int64_t stride = sums_size(s);
  const auto add = [&](const at::Tensor& grad, const A* from) {
    if (!grad.defined()) return;
    const int64_t cols = grad.size(-1), rows = grad.numel() / cols;
    const Rows<A> to(grad.dim() == 2 ? grad : grad.unsqueeze(0));
    at::parallel_for(0, rows, std::max<int64_t>(1, 16384 / cols), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        adapter_add_partials(from + r * cols, ranges.count, stride, cols, to.at(r, 0));
      }
    });
  };
  for (size_t i = 0; i < adapters.size(); ++i) {
    add(adapters[i].da, first.da[i]);
    add(adapters[i].db, first.db[i]);
    add(adapters[i].dbias, first.dbias[i]);
  }
}

template <typename T, typename D>
void backward(const at::Tensor& dy, const at::Tensor& in, const at::Tensor& din,
              const Adapters& adapters, const AdapterPlace& place) {
  using A = acc_t<T>;
  const int64_t n = dy.size(0);
  const AdapterSizes s = sizes_of(n, dy.size(1), adapters, true, din.defined());
  const Call<T> call(adapters, place, s.m);
  const Ranges ranges(n);
  const Rows<T> dy_rows(dy), in_rows(in);
  const Rows<D> din_rows(din);
  const at::Tensor memory =
      at::empty({ranges.count, sums_size(s)}, at::CppTypeToScalarType<A>::value);
  A* sums_data = static_cast<A*>(memory.mutable_data_ptr());
  run_tasks(ranges.count, thread_bytes<A>(s), [&](int64_t range, char* mine) {
    Pieces pieces(mine);
    const Scratch<A> scratch(pieces, s);
    A* own = sums_data + range * sums_size(s);
    std::fill_n(own, sums_size(s), A(0));
    const Sums<A> sums(adapters, s, own);
    const int64_t end = std::min(n, (range + 1) * ranges.rows);
    for (int64_t row = range * ranges.rows; row < end; row += kRows) {
      backward_block(call, dy_rows, in_rows, din_rows, row, std::min(kRows, end - row), sums,
                     scratch);
    }
  });
  add_sums(adapters, s, ranges, sums_data);
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

void adapters_bwd_cpu(const at::Tensor& dy, const at::Tensor& in, const at::Tensor& din,
                      const Adapters& adapters, const AdapterPlace& place) {
  if (adapters.empty() || dy.numel() == 0) return;
  for_dtype(dy.scalar_type(), [&](auto type) {
    using T = decltype(type);
    if (din.defined() && din.scalar_type() != dy.scalar_type()) {
      backward<T, acc_t<T>>(dy, in, din, adapters, place);
    } else {
      backward<T, T>(dy, in, din, adapters, place);
    }
  });
}

int64_t adapter_scratch_bytes(const AdapterSizes& s, at::ScalarType acc, int64_t threads) {
  const bool wide = acc == at::kDouble;
  const int64_t each = wide ? thread_bytes<double>(s) : thread_bytes<float>(s);
  if (s.n == 0) return 0;
  const Ranges ranges(s.n);
  const int64_t tasks = s.backward ? ranges.count : (s.n + kRows - 1) / kRows;
  const int64_t sums = s.backward ? ranges.count * sums_size(s) * (wide ? 8 : 4) : 0;
  return std::min(threads, tasks) * each + sums;
}

}  // namespace ckptfused
