#pragma once

#include "ops/torch.h"

#include <ATen/ops/addmm_cpu_dispatch.h>

#include <algorithm>
#include <type_traits>

#include "kernels/cpu/threads.h"
#include "math/types.h"
#include "ops/ledger.h"
#include "ops/parallel_cpu.h"

// What ops are made of that cut their work into tasks, each of which runs on one thread: small
// matrix products between torch-free row kernels, in scratch of the thread's own.

namespace ckptfused::tiles {

template <typename T>
constexpr bool kConverted = !std::is_same_v<T, acc_t<T>>;

// Calls f(T{}) with the kernels' type for dtype.
template <typename F>
auto for_dtype(at::ScalarType dtype, F f) {
  switch (dtype) {
    case at::kDouble:
      return f(double{});
    case at::kFloat:
      return f(float{});
    case at::kBFloat16:
      return f(bf16{});
    default:
      return f(f16{});
  }
}

// Cache-line aligned pieces of a thread's scratch. Counting and handing out are the same walk:
// without memory the pieces are null and only bytes() means something.
class Pieces {
 public:
  explicit Pieces(char* memory) : memory_(memory) {}
  template <typename A>
  A* take(int64_t count) {
    A* piece = memory_ == nullptr ? nullptr : reinterpret_cast<A*>(memory_ + used_);
    used_ += (count * int64_t(sizeof(A)) + 63) / 64 * 64;
    return piece;
  }
  int64_t bytes() const { return used_; }

 private:
  char* memory_;
  int64_t used_ = 0;
};

// A row-major matrix, or the transpose of one.
template <typename T>
struct Matrix {
  T* data;
  int64_t rows, cols, stride;
  bool transposed = false;

  Matrix t() const { return {data, cols, rows, stride, !transposed}; }
  at::Tensor tensor() const {
    return at::from_blob(data, {rows, cols}, {transposed ? 1 : stride, transposed ? stride : 1},
                         at::CppTypeToScalarType<T>::value);
  }
};

// out = beta * out + alpha * a @ b. Calls the CPU kernel without the dispatcher, whose state
// (autograd, modes) is not that of the thread that called the op.
template <typename A>
void product(const Matrix<A>& out, const Matrix<A>& a, const Matrix<A>& b, double alpha,
             double beta) {
  at::Tensor result = out.tensor();
  at::cpu::addmm_out(result, result, a.tensor(), b.tensor(), beta, alpha);
}

// Calls f(task, scratch) for every task, in parallel, each thread with `bytes` of its own. Products
// in a task run on its thread alone, whose number would otherwise show in their bits.
template <typename F>
void run_tasks(int64_t tasks, int64_t bytes, F f) {
  if (tasks == 0) return;
  const Ledger::Name name("scratch of the threads");
  const at::Tensor scratch =
      at::empty({std::min(cpu_threads(), tasks), bytes}, at::device(host()).dtype(at::kByte));
  if (counting()) return;
  char* memory = static_cast<char*>(scratch.mutable_data_ptr());
  parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
    // A thread's first use of PyTorch sets its number of threads: now, not within a product.
    at::get_num_threads();
    const ThreadsGuard serial(1);
    char* mine = memory + at::get_thread_num() * bytes;
    for (int64_t task = begin; task < end; ++task) f(task, mine);
  });
}

}  // namespace ckptfused::tiles
