#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "tests/cuda/rows_util.h"
#include "tests/host_cuda.h"

// Tensors of more than 2^32 elements, contiguous or with strides. The first blocks of a kernel's
// grid run and the last, on both ends of the tensors, which must come out as they do in a small
// tensor. Sizes are such that an index of 32 bits, signed or not, which should be at the last end
// is one of the first; what lies between cannot be touched.

namespace ckptfused {

// Addresses of `size` elements, of which only those that were opened can be touched: elsewhere, and
// as far in front as a wrapped 32-bit index leads, a program ends. No memory until it is written.
template <typename T>
class Sparse {
 public:
  explicit Sparse(int64_t size)
      : bytes_(kFront + size_t(size) * sizeof(T)),
        memory_(static_cast<char*>(
            mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))) {
    if (memory_ == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
    madvise(memory_, bytes_, MADV_NOHUGEPAGE);
  }
  ~Sparse() { munmap(memory_, bytes_); }
  Sparse(const Sparse&) = delete;
  Sparse& operator=(const Sparse&) = delete;

  T* data() { return reinterpret_cast<T*>(memory_ + kFront); }
  // From now on these elements can be read and written, and are zeros at first.
  T* open(int64_t first, int64_t count) {
    allow(kFront + size_t(first) * sizeof(T), size_t(count) * sizeof(T), PROT_READ | PROT_WRITE);
    return data() + first;
  }
  // From now on all elements can be read. To be called before any is opened.
  void open_to_read() { allow(kFront, bytes_ - kFront, PROT_READ); }

 private:
  static constexpr size_t kFront = sizeof(T) << 31;
  void allow(size_t begin, size_t count, int what) {
    const size_t page = size_t(sysconf(_SC_PAGESIZE)), first = begin / page * page;
    if (mprotect(memory_ + first, begin + count - first, what) != 0) {
      throw std::system_error(errno, std::generic_category(), "mprotect");
    }
  }
  size_t bytes_;
  char* memory_;
};

// The same random pieces of `length` elements twice: one behind the other in `small`, and
// with `stride` elements from one to the next in `large`.
template <typename T>
struct Pieces {
  int64_t count, length, stride;
  std::vector<T> small;
  Sparse<T> large;

  Pieces(int64_t count, int64_t length, int64_t stride, uint32_t seed)
      : count(count),
        length(length),
        stride(stride),
        small(random_values<T>(count * length, seed).stored),
        large((count - 1) * stride + length) {
    for (int64_t i = 0; i < count; ++i) {
      std::copy_n(&small[i * length], length, large.open(i * stride, length));
    }
  }
  // Whether both have the same bits.
  bool same() {
    for (int64_t i = 0; i < count; ++i) {
      const T* piece = large.data() + i * stride;
      if (std::memcmp(&small[i * length], piece, size_t(length) * sizeof(T)) != 0) return false;
    }
    return true;
  }
};

// Both ends of a tensor of `size` elements.
template <typename T>
struct Ends : Pieces<T> {
  Ends(int64_t size, int64_t length, uint32_t seed) : Pieces<T>(2, length, size - length, seed) {}
};

using host_cuda::OnlyEnds;

constexpr double kEps = 1e-5;
constexpr int64_t kTwo32 = int64_t(1) << 32;

// Rows and columns of a contiguous tensor, and how many of the rows lie in each end: those
// that a block takes.
struct Size {
  int64_t rows, cols, ends;
  int64_t elements() const { return rows * cols; }
  int64_t end_elements() const { return ends * cols; }
  // Of row i of both ends, one behind the other.
  int64_t row(int64_t i) const { return i < ends ? i : rows - 2 * ends + i; }
};

// Of kernels that take a group of eight columns after the other: 1024 groups a block. More groups
// than 2^32 with whole words or without, and a row of many.
constexpr Size kElementSizes[] = {
    {kTwo32 + 1024, 8, 1024}, {kTwo32 + 1024, 7, 1024}, {kTwo32 / 8192 + 1, 8192, 1}};

// Of kernels that take rows: four narrow ones a block, one that is held in registers, and one that
// is not.
constexpr Size kRowSizes[] = {
    {kTwo32 + 4, 8, 4}, {kTwo32 / 1024 + 1, 1024, 1}, {kTwo32 / 32768 + 1, 32768, 1}};

}  // namespace ckptfused
