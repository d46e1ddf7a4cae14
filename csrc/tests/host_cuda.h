#pragma once

// CUDA C++ kernels on the CPU: what a kernel file of csrc/kernels/cuda needs to be compiled by g++.
// Blocks run one after the other, __shared__ is static, shuffles go through shared slots, and
// __syncthreads() is a barrier. Under ThreadSanitizer each thread of a block is a host thread, so
// that a missing barrier is seen as the data race that it is. Else the threads take turns on one
// host thread: barriers of hundreds of host threads are slow.

#if defined(__SANITIZE_THREAD__)
#include <pthread.h>

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#else
#include <setjmp.h>
#include <ucontext.h>
#endif

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __restrict__
#define __launch_bounds__(...)
#define __grid_constant__

// As on the device: in the global namespace.

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
// Read and written over memory of other types, as on the device.
struct __attribute__((may_alias, aligned(16))) uint4 {
  unsigned x, y, z, w;
};

namespace ckptfused::host_cuda {

constexpr int kWarp = 32;

inline thread_local int current_thread = 0;

#if defined(__SANITIZE_THREAD__)

// What std::barrier does, at a third of its time under ThreadSanitizer. Two barriers in turn:
// ThreadSanitizer keeps one clock a barrier, so that a thread which wakes late would also take in
// what a faster one did up to its next arrival, and a missing barrier in between would be hidden.
class Barrier {
 public:
  explicit Barrier(int threads) {
    for (pthread_barrier_t& barrier : barriers_) {
      pthread_barrier_init(&barrier, nullptr, unsigned(threads));
    }
  }
  ~Barrier() {
    for (pthread_barrier_t& barrier : barriers_) pthread_barrier_destroy(&barrier);
  }
  Barrier(const Barrier&) = delete;
  Barrier& operator=(const Barrier&) = delete;
  void arrive_and_wait() { pthread_barrier_wait(&barriers_[turn_[current_thread] ^= 1]); }

 private:
  pthread_barrier_t barriers_[2];
  int turn_[1024] = {};  // each thread's own
};

// Threads that stay: to start hundreds for each kernel took longer than most kernels. What they
// wait for here orders nothing within a kernel, in which none ends before all have begun: every
// block closes with a barrier.
class Pool {
 public:
  ~Pool() {
    run(0, nullptr);
    for (std::thread& thread : pool_) thread.join();
  }
  // Calls task(0) .. task(threads - 1), each on a thread of its own. nullptr: they all end.
  void run(int threads, std::function<void(int)> task) {
    std::unique_lock<std::mutex> lock(mutex_);
    task_ = std::move(task);
    threads_ = left_ = threads;
    ++round_;
    while (int(pool_.size()) < threads) {
      pool_.emplace_back(
          [this, thread = int(pool_.size()), seen = round_ - 1] { work(thread, seen); });
    }
    changed_.notify_all();
    changed_.wait(lock, [&] { return left_ == 0; });
  }

 private:
  void work(int thread, int64_t seen) {
    current_thread = thread;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return round_ != seen; });
      seen = round_;
      if (!task_) return;
      if (thread >= threads_) continue;
      lock.unlock();
      task_(thread);
      lock.lock();
      if (--left_ == 0) changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void(int)> task_;
  std::vector<std::thread> pool_;
  int threads_ = 0, left_ = 0;
  int64_t round_ = 0;
};

// Calls run(0) .. run(threads - 1), each on a thread of its own.
template <typename Run>
void run_threads(int threads, Run run) {
  static Pool pool;
  pool.run(threads, run);
}

#else

// Threads that take turns: one runs until it waits at a barrier. Only the first switch to a thread
// is setcontext's, which gives it a stack; swapcontext calls the kernel of the system each time,
// and took nine tenths of these tests' time.
class Turns {
 public:
  Turns(int threads, void (*run)(void*, int), void* run_of)
      : threads_(size_t(threads)), run_(run), run_of_(run_of) {}

  void run_all();
  // Called by a thread: the others go on.
  void give_up() {
    if (_setjmp(threads_[size_t(current_thread)].at) == 0) _longjmp(back_, 1);
  }

 private:
  struct Thread {
    jmp_buf at;
    bool started = false, done = false;
  };
  void resume(int thread);
  static void start();

  std::vector<Thread> threads_;
  jmp_buf back_;
  void (*run_)(void*, int);
  void* run_of_;
};
inline Turns* turns = nullptr;

inline void Turns::start() {
  turns->run_(turns->run_of_, current_thread);
  turns->threads_[size_t(current_thread)].done = true;
  _longjmp(turns->back_, 1);
}

inline void Turns::resume(int thread) {
  constexpr size_t kStack = 256 << 10;
  static std::vector<std::unique_ptr<char[]>> stacks;
  if (_setjmp(back_) != 0) return;  // the thread gave up its turn, or is done
  current_thread = thread;
  Thread& to = threads_[size_t(thread)];
  if (to.started) _longjmp(to.at, 1);
  to.started = true;
  if (stacks.size() <= size_t(thread)) stacks.emplace_back(new char[kStack]);
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = stacks[size_t(thread)].get();
  context.uc_stack.ss_size = kStack;
  makecontext(&context, &Turns::start, 0);
  setcontext(&context);
}

inline void Turns::run_all() {
  turns = this;
  for (size_t left = threads_.size(); left > 0;) {
    for (size_t thread = 0; thread < threads_.size(); ++thread) {
      if (threads_[thread].done) continue;
      resume(int(thread));
      left -= threads_[thread].done ? 1 : 0;
    }
  }
}

class Barrier {
 public:
  explicit Barrier(int threads) : threads_(threads) {}
  void arrive_and_wait() {
    const int round = round_;
    if (++arrived_ == threads_) {
      arrived_ = 0;
      ++round_;
    }
    while (round_ == round) turns->give_up();
  }

 private:
  int threads_, arrived_ = 0, round_ = 0;
};

template <typename Run>
void run_threads(int threads, Run run) {
  Turns(threads, [](void* of, int thread) { (*static_cast<Run*>(of))(thread); }, &run).run_all();
}

#endif

// What the threads of a warp exchange values through. Two rounds of slots: a thread may already
// write the next exchange while a slow one still reads the last.
struct Warp {
  explicit Warp(int lanes) : barrier(lanes) {}
  Barrier barrier;
  uint64_t slot[2][kWarp] = {};
  int round[kWarp] = {};  // each lane's own
};

struct BlockThreads {
  Barrier barrier;
  std::vector<std::unique_ptr<Warp>> warps;
  explicit BlockThreads(int threads) : barrier(threads) {
    for (int first = 0; first < threads; first += kWarp) {
      warps.push_back(std::make_unique<Warp>(threads - first < kWarp ? threads - first : kWarp));
    }
  }
};

inline thread_local BlockThreads* current_block = nullptr;

// While it lives, only so many blocks at either end of a row of blocks run: a grid for a tensor
// that is larger than memory has too many.
class OnlyEnds {
 public:
  explicit OnlyEnds(unsigned blocks) { at_an_end = blocks; }
  ~OnlyEnds() { at_an_end = ~0u; }
  OnlyEnds(const OnlyEnds&) = delete;
  OnlyEnds& operator=(const OnlyEnds&) = delete;
  // The block that follows block x of a row.
  static unsigned after(unsigned x, unsigned blocks) {
    ++x;
    return x == at_an_end && blocks - x > at_an_end ? blocks - at_an_end : x;
  }

 private:
  static inline unsigned at_an_end = ~0u;
};

inline Warp& current_warp() {
  return *current_block->warps[size_t(current_thread / kWarp)];
}

// The value of another lane of this warp. Every lane of the warp must take part.
template <typename T>
T exchange(T value, int source_lane) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  Warp& warp = current_warp();
  const int lane = current_thread % kWarp;
  uint64_t* slots = warp.slot[warp.round[lane] ^= 1];
  std::memcpy(&slots[lane], &value, sizeof value);
  warp.barrier.arrive_and_wait();
  T result;
  std::memcpy(&result, &slots[source_lane], sizeof result);
  return result;
}

}  // namespace ckptfused::host_cuda

// The threads of a block, as an object whose x is the thread's own.
struct HostThreadIdx {
  struct X {
    operator unsigned() const { return unsigned(ckptfused::host_cuda::current_thread); }
  } x;
};
inline HostThreadIdx threadIdx;
inline thread_local dim3 blockIdx;
inline dim3 blockDim, gridDim;

inline void __syncthreads() {
  ckptfused::host_cuda::current_block->barrier.arrive_and_wait();
}
inline void __syncwarp(unsigned = ~0u) {
  ckptfused::host_cuda::current_warp().barrier.arrive_and_wait();
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int lane_mask, int = 32) {
  return ckptfused::host_cuda::exchange(value, int(threadIdx.x % 32) ^ lane_mask);
}
template <typename T>
T __shfl_sync(unsigned, T value, int source, int width = 32) {
  const int lane = int(threadIdx.x % 32);
  return ckptfused::host_cuda::exchange(value, lane / width * width + source % width);
}

namespace ckptfused {

// The host-run counterpart of the launch in kernels/cuda/launch.cuh.
template <typename... Params, typename... Args>
const char* launch(void (*kernel)(Params...), dim3 grid, dim3 block, void* /*stream*/,
                   Args... args) {
  const int threads = int(block.x);
  if (block.y != 1 || block.z != 1 || threads < 1 || threads > 1024) return "bad block";
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return "empty grid";
  blockDim = block;
  gridDim = grid;
  host_cuda::BlockThreads shared(threads);
  host_cuda::run_threads(threads, [&](int) {
    host_cuda::current_block = &shared;
    for (unsigned z = 0; z < grid.z; ++z) {
      for (unsigned y = 0; y < grid.y; ++y) {
        for (unsigned x = 0; x < grid.x; x = host_cuda::OnlyEnds::after(x, grid.x)) {
          blockIdx = dim3(x, y, z);
          kernel(args...);
          shared.barrier.arrive_and_wait();
        }
      }
    }
  });
  return nullptr;
}

}  // namespace ckptfused
