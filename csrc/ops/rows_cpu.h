#pragma once

#include <algorithm>
#include <cstring>

#include "kernels/cpu/rows.h"
#include "ops/parallel_cpu.h"
#include "ops/row_args.h"

// How ops on rows run in parallel on the CPU.

namespace ckptfused {

// Calls rows(begin, end) over [0, n) in parallel.
template <typename Rows>
void parallel_rows(int64_t n, int64_t cols, Rows rows) {
  constexpr int64_t kElements = 32768;  // per task at least
  parallel_for(0, n, std::max<int64_t>(1, kElements / std::max<int64_t>(1, cols)), rows);
}

// Calls rows(begin, end, dweight, dbias) over the call's rows in parallel, a chunk at a time, where
// each call adds to the chunk's own [cols] zeros in the call's dweight and dbias. Either may be
// absent. width: what a row costs, where that is not cols.
template <typename Rows>
void parallel_rows_with_grads(const RowCall& call, int64_t cols, int64_t width, Rows rows) {
  if (!given(call.dweight) && !given(call.dbias)) {
    parallel_rows(call.rows, width,
                  [&](int64_t begin, int64_t end) { rows(begin, end, nullptr, nullptr); });
    return;
  }
  const RowChunks chunks{call.rows, call.chunks(0)};
  parallel_for(0, chunks.count, 1, [&](int64_t chunk_begin, int64_t chunk_end) {
    for (int64_t chunk = chunk_begin; chunk < chunk_end; ++chunk) {
      const auto zeroed = [&](const OptionalTensor& all) -> void* {
        if (!given(all)) return nullptr;
        const int64_t bytes = cols * int64_t(all->element_size());
        void* partial = static_cast<char*>(all->mutable_data_ptr()) + chunk * bytes;
        return std::memset(partial, 0, size_t(bytes));
      };
      rows(chunks.begin(chunk), chunks.end(chunk), zeroed(call.dweight), zeroed(call.dbias));
    }
  });
}

}  // namespace ckptfused
