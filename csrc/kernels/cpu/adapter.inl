CKPT_BEGIN_TARGET

// Columns taken at a time: the draws of a run stay in L1.
constexpr int64_t kAdapterRun = 512;

// Calls each(row, col, n, draws) for runs of columns of every row; draws is null where nothing is
// dropped.
template <typename Each>
CKPT_HD void for_runs(const AdapterBlock& a, Each each) {
  uint16_t buffer[kAdapterRun + 16];
  for (int64_t row = 0; row < a.rows; ++row) {
    if (!a.dropout.active()) {
      each(row, int64_t(0), a.cols, static_cast<const uint16_t*>(nullptr));
      continue;
    }
    const int64_t logical_row = a.row_map(a.row0 + row);
    for (int64_t col = 0; col < a.cols; col += kAdapterRun) {
      const int64_t n = a.cols - col < kAdapterRun ? a.cols - col : kAdapterRun;
      const int64_t first = a.col0 + col;
      each(row, col, n, dropout_draws(a.dropout, logical_row, first, first + n, buffer));
    }
  }
}

template <typename T>
void load_dropped(const AdapterBlock& a, const T* in, int64_t stride, acc_t<T>* out) {
  const uint32_t threshold = a.dropout.threshold;
  const acc_t<T> scale = a.dropout.template scale_as<acc_t<T>>();
  for_runs(a, [&](int64_t row, int64_t col, int64_t n, const uint16_t* draws) {
    const T* from = in + row * stride + col;
    acc_t<T>* to = out + row * a.cols + col;
    if (draws == nullptr) return load_row(from, to, n);
    CKPT_IVDEP
    for (int64_t i = 0; i < n; ++i)
      to[i] = dropout_apply(to_acc(from[i]), draws[i], threshold, scale);
  });
}

template <typename T>
void add_dropped(const AdapterBlock& a, const acc_t<T>* in, T* out, int64_t stride) {
  using A = acc_t<T>;
  const uint32_t threshold = a.dropout.threshold;
  const A scale = a.dropout.template scale_as<A>();
  for_runs(a, [&](int64_t row, int64_t col, int64_t n, const uint16_t* draws) {
    const A* from = in + row * a.cols + col;
    T* to = out + row * stride + col;
    if (draws == nullptr) {
      CKPT_IVDEP
      for (int64_t i = 0; i < n; ++i) from_acc(A(to_acc(to[i])) + from[i], to[i]);
      return;
    }
    CKPT_IVDEP
    for (int64_t i = 0; i < n; ++i) {
      from_acc(A(to_acc(to[i])) + dropout_apply(from[i], draws[i], threshold, scale), to[i]);
    }
  });
}

// Four sums a column, and only their sum is added to what was there: the error of a sum grows with
// the number of its terms.
template <typename A>
void sum_rows(int64_t rows, int64_t cols, const A* in, A scale, A* sums) {
  constexpr int64_t kWidth = 64, kLanes = 4;
  for (int64_t col = 0; col < cols; col += kWidth) {
    const int64_t n = cols - col < kWidth ? cols - col : kWidth;
    A lane[kLanes][kWidth] = {};
    for (int64_t row = 0; row < rows; ++row) {
      const A* from = in + row * cols + col;
      A* to = lane[row % kLanes];
      CKPT_IVDEP
      for (int64_t c = 0; c < n; ++c) to[c] += from[c];
    }
    CKPT_IVDEP
    for (int64_t c = 0; c < n; ++c) {
      sums[col + c] += scale * ((lane[0][c] + lane[1][c]) + (lane[2][c] + lane[3][c]));
    }
  }
}

template <typename A>
void add_partials(const A* partials, int64_t count, int64_t stride, int64_t n, A* out) {
  for (int64_t k = 0; k < count; ++k) {
    const A* partial = partials + k * stride;
    CKPT_IVDEP
    for (int64_t i = 0; i < n; ++i) out[i] += partial[i];
  }
}

CKPT_END_TARGET
