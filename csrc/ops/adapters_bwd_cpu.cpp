#include "ops/torch.h"

#include "ops/adapter_blocks_cpu.h"

namespace ckptfused {
namespace {

using namespace adapter_blocks;

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

// The sums of one range of rows, a part for each gradient that is asked for. Each begins a cache
// line: PyTorch's products may round otherwise elsewhere, and its place depends on the parts
// before.
template <typename A>
struct Sums {
  std::vector<A*> da, db, dbias;

  Sums(const Adapters& adapters, const AdapterSizes& s, Pieces& pieces) {
    const auto take = [&](const at::Tensor& wanted, int64_t size) {
      return wanted.defined() ? pieces.take<A>(size) : nullptr;
    };
    for (const Adapter& adapter : adapters) {
      const int64_t rank = adapter.a.size(0);
      da.push_back(take(adapter.da, rank * s.k));
      db.push_back(take(adapter.db, rank * s.m));
      dbias.push_back(take(adapter.dbias, s.m));
    }
  }
};

// Bytes of one range's sums.
template <typename A>
int64_t sums_bytes(const Adapters& adapters, const AdapterSizes& s) {
  Pieces pieces(nullptr);
  Sums<A>(adapters, s, pieces);
  return pieces.bytes();
}

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

// Adds the ranges' sums to the gradients, in the order of the ranges.
template <typename A>
void add_sums(const Adapters& adapters, const AdapterSizes& s, const Ranges& ranges, char* memory) {
  Pieces pieces(memory);
  const Sums<A> first(adapters, s, pieces);
  const int64_t stride = pieces.bytes() / int64_t(sizeof(A));
  const auto add = [&](const at::Tensor& grad, const A* from) {
    if (!grad.defined() || grad.numel() == 0) return;
    const int64_t cols = grad.size(-1), rows = grad.numel() / cols;
    const Rows<A> to(grad.dim() == 2 ? grad : grad.unsqueeze(0));
    parallel_for(0, rows, std::max<int64_t>(1, 16384 / cols), [&](int64_t begin, int64_t end) {
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
  const int64_t range_bytes = sums_bytes<A>(adapters, s);
  const at::Tensor memory = at::empty({ranges.count, range_bytes}, dy.options().dtype(at::kByte));
  char* sums_data = static_cast<char*>(memory.mutable_data_ptr());
  run_tasks(ranges.count, thread_bytes<A>(s), [&](int64_t range, char* mine) {
    Pieces pieces(mine);
    const Scratch<A> scratch(pieces, s);
    char* own = sums_data + range * range_bytes;
    std::fill_n(own, range_bytes, char(0));
    Pieces own_pieces(own);
    const Sums<A> sums(adapters, s, own_pieces);
    const int64_t end = std::min(n, (range + 1) * ranges.rows);
    for (int64_t row = range * ranges.rows; row < end; row += kRows) {
      backward_block(call, dy_rows, in_rows, din_rows, row, std::min(kRows, end - row), sums,
                     scratch);
    }
  });
  if (!counting()) add_sums<A>(adapters, s, ranges, sums_data);
}

}  // namespace

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

}  // namespace ckptfused
