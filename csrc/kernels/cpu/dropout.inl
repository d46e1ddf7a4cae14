CKPT_BEGIN_TARGET

void dropout_mask(const Dropout& dropout, int64_t cols, int64_t begin, int64_t end, bool* keep,
                  RowScratch& scratch) {
  uint16_t* buffer = scratch.take<uint16_t>(dropout_buffer_size(cols));
  const uint32_t threshold = dropout.threshold;
  for (int64_t row = begin; row < end; ++row, keep += cols) {
    const uint16_t* draws = dropout_draws(dropout, row, 0, cols, buffer);
    CKPT_IVDEP
    for (int64_t c = 0; c < cols; ++c) keep[c] = draws[c] >= threshold;
  }
}

CKPT_END_TARGET
