CKPT_BEGIN_TARGET

template <typename T, typename C>
void left_row_copies(const T* in, int64_t stride, int64_t rows, int64_t cols, C* left,
                     int64_t out_rows, int64_t out_cols) {
  for (int64_t r = 0; r < out_rows; ++r) {
    C* row = left + r * out_cols;
    const int64_t n = r < rows ? cols : 0;
    CKPT_IVDEP
    for (int64_t i = 0; i < n; ++i) row[i] = converted<C>(in[r * stride + i]);
    for (int64_t i = n; i < out_cols; ++i) row[i] = C{};
  }
}

template <typename C>
CKPT_HD void clear(C* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = C{};
}

// Zeros from a column on; all of a row where most are.
template <typename C>
CKPT_HD void clear_columns(C* x, int64_t rows, int64_t cols, int64_t begin) {
  if (begin < kRowBlock) return clear(x, begin < cols ? rows * cols : 0);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = begin; i < cols; ++i) x[r * cols + i] = C{};
  }
}

// A block of so many rows at a time, whose cache lines are all at hand.
template <typename T, typename C>
void left_column_copies(const T* in, int64_t stride, int64_t rows, int64_t cols, C* left,
                        int64_t out_cols) {
  int64_t row = 0;
  for (; row + kRowBlock <= rows; row += kRowBlock) {
    for (int64_t c = 0; c < cols; ++c) {
      const T* column = in + row * stride + c;
      C* out = left + c * out_cols + row;
      CKPT_IVDEP
      for (int64_t i = 0; i < kRowBlock; ++i) out[i] = converted<C>(column[i * stride]);
    }
  }
  clear_columns(left, cols, out_cols, rows);
  for (; row < rows; ++row) {
    for (int64_t c = 0; c < cols; ++c)
      left[c * out_cols + row] = converted<C>(in[row * stride + c]);
  }
}

template <typename T, typename C>
void right_row_copies(const T* in, int64_t stride, int64_t rows, int64_t cols, C* right,
                      int64_t out_rows) {
  if constexpr (kRowsAbreast<C> == 1) {
    left_row_copies(in, stride, rows, cols, right, out_rows, cols);
  } else {
    Pair* out = reinterpret_cast<Pair*>(right);
    for (int64_t r = 0; r < out_rows; r += 2, out += cols) {
      const T* low = in + r * stride;
      if (r < rows) {
        interleave_rows(low, r + 1 < rows ? low + stride : nullptr, cols, out);
      } else {
        clear(out, cols);
      }
    }
  }
}

template <typename T, typename C>
void right_column_copies(const T* in, int64_t stride, int64_t rows, int64_t cols, C* right,
                         int64_t out_rows, int64_t out_cols) {
  if constexpr (kRowsAbreast<C> == 1) {
    left_column_copies(in, stride, rows, cols, right, out_cols);
  } else {
    Pair* out = reinterpret_cast<Pair*>(right);
    const auto pair_at = [&](int64_t row, int64_t c) {
      const T* x = in + row * stride + c;
      return pair_of(x[0], c + 1 < cols ? x[1] : T{});
    };
    int64_t row = 0;
    for (; row + kRowBlock <= rows; row += kRowBlock) {
      for (int64_t c = 0; c + 1 < cols; c += 2) {
        const T* x = in + row * stride + c;
        Pair* pairs = out + c / 2 * out_cols + row;
        CKPT_IVDEP
        for (int64_t i = 0; i < kRowBlock; ++i) {
          pairs[i] = pair_of(x[i * stride], x[i * stride + 1]);
        }
      }
      if (cols % 2 == 0) continue;
      for (int64_t i = row; i < row + kRowBlock; ++i)
        out[cols / 2 * out_cols + i] = pair_at(i, cols - 1);
    }
    clear_columns(out, out_rows / 2, out_cols, rows);
    for (; row < rows; ++row) {
      for (int64_t c = 0; c < out_rows; c += 2) out[c / 2 * out_cols + row] = pair_at(row, c);
    }
  }
}

template <typename A>
void transposed_sums(const A* products, int64_t product_stride, int64_t rows, int64_t cols, A* sums,
                     int64_t stride) {
  for (int64_t row = 0; row < rows; row += kRowBlock) {
    const int64_t end = row + kRowBlock < rows ? row + kRowBlock : rows;
    for (int64_t r = row; r < end; ++r) {
      CKPT_IVDEP
      for (int64_t i = 0; i < cols; ++i) {
        sums[r * stride + i] += products[i * product_stride + r];
      }
    }
  }
}

CKPT_END_TARGET
