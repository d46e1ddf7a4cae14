CKPT_BEGIN_TARGET

void dropout_mask(const Dropout& dropout, int64_t row, int64_t col0, int64_t col1, uint16_t* buffer,
                  bool* keep) {
  const uint16_t* draws = dropout_draws(dropout, row, col0, col1, buffer);
  const uint32_t threshold = dropout.threshold;
  CKPT_IVDEP
  for (int64_t c = 0; c < col1 - col0; ++c) keep[c] = draws[c] >= threshold;
}

CKPT_END_TARGET
