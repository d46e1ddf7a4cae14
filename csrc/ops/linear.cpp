#include "ops/torch.h"

#include "ops/linear.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "kernels/cpu/target.h"
#include "ops/ledger.h"

#if CKPT_HAS_X86_TARGETS
#include <cpuid.h>
#endif

// oneDNN's product in PyTorch, which PyTorch itself calls for half precision only: no header of it
// is installed. Null where PyTorch was built without it.
namespace at::native {
void mkldnn_matmul(const Tensor& a, const Tensor& b, const Tensor& out, float beta, float alpha)
    __attribute__((weak));
}

namespace ckptfused {
namespace {

// Rows, columns and depth of a float32 block: 4 MiB each for a, b and their product. Smaller
// blocks spend more of their time converting; larger ones gained nothing when measured.
constexpr int64_t kBlock = 1024;

// What decides between the ways to a product on this processor.
struct Processor {
  bool bfloat16 = true, half = true;  // it has matrix instructions for them
  bool mkl_is_slow = false;  // it has AVX-512 that MKL, which asks for Intel's, leaves alone
};

// Elsewhere than on x86 the platform's library is trusted.
Processor detect() {
  Processor found;
#if CKPT_HAS_X86_TARGETS
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0, eax1 = 0, ebx1 = 0, ecx1 = 0, edx1 = 0;
  const bool avx512 =
      __builtin_cpu_supports("avx512f") && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0;
  if (avx512 && eax >= 1) __get_cpuid_count(7, 1, &eax1, &ebx1, &ecx1, &edx1);
  const bool amx_bf16 = (edx >> 22) & 1, avx512_fp16 = (edx >> 23) & 1;
  const bool avx512_bf16 = (eax1 >> 5) & 1, amx_fp16 = (eax1 >> 21) & 1;
  found.bfloat16 = avx512 && (avx512_bf16 || amx_bf16);
  found.half = avx512 && (avx512_fp16 || amx_fp16);
  found.mkl_is_slow = at::hasMKL() && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      !__builtin_cpu_is("intel");
#endif
  return found;
}

const Processor& processor() {
  static const Processor detected = detect();
  return detected;
}

// oneDNN is as fast as MKL from 2 million multiplications on where the result has 128 rows and
// columns: a thinner one took up to 3.6 times as long in its blocks. Its workspace, of which 385
// KiB a thread is the most that was measured, is PyTorch's memory and no ledger's: of steps with
// smaller products than these it would be a part that matters.
constexpr int64_t kOneDnnProduct = int64_t(1) << 24, kOneDnnSide = 128;
constexpr int64_t kOneDnnWorkspace = int64_t(400) << 10;
// Depth of its blocks: its error, which has grown to 2.5 times MKL's at 512, is 1.2 times MKL's
// here.
constexpr int64_t kOneDnnDepth = 256;

// Whether float32 blocks of a product are multiplied by oneDNN: decided by processor and shape
// alone.
bool runs_in_onednn(const at::Tensor& a, const at::Tensor& b) {
  return on_cpu(a) && mkl_is_slow() && at::globalContext().userEnabledMkldnn() &&
         a.numel() * b.size(1) >= kOneDnnProduct && std::min(a.size(0), b.size(1)) >= kOneDnnSide;
}

// Whether every block of so many rows and columns of a matrix, or of one whose transpose lies in
// memory, is one piece of memory: others are copied, by oneDNN if not here.
bool blocks_are_dense(const at::Tensor& t, int64_t rows, int64_t cols) {
  return (t.is_contiguous() && cols >= t.size(1)) || (t.t().is_contiguous() && rows >= t.size(0));
}

// What float32 blocks are made in. Undefined where they are not needed: a and b, of which every
// block can be used where it lies; bias and sum.
struct FloatBuffers {
  int64_t n, k, c;  // of a block
  at::Tensor a, b, bias, sum;

  FloatBuffers(const at::Tensor& out, const at::Tensor& a_, const at::Tensor& b_, bool with_bias)
      : n(std::min(a_.size(0), kBlock)),
        k(std::min(b_.size(1), kBlock)),
        c(std::min(a_.size(1), runs_in_onednn(a_, b_) ? kOneDnnDepth : kBlock)) {
    const Ledger::Name name("float32 blocks");
    const bool cast = a_.scalar_type() != at::kFloat;
    const auto make = [&](int64_t size) {
      return at::empty({size}, a_.options().dtype(at::kFloat));
    };
    if (cast || !blocks_are_dense(a_, n, c)) a = make(n * c);
    if (cast || !blocks_are_dense(b_, c, k)) b = make(c * k);
    if (cast && with_bias) bias = make(k);
    if (out.scalar_type() != at::kFloat) sum = make(n * k);
  }
};

at::Tensor block_of(const at::Tensor& t, int64_t row, int64_t rows, int64_t col, int64_t cols) {
  return t.slice(0, row, std::min(row + rows, t.size(0)))
      .slice(1, col, std::min(col + cols, t.size(1)));
}

// A block, or its float32 copy in its own memory order at the start of the buffer.
at::Tensor to_float(const at::Tensor& block, const at::Tensor& buffer) {
  if (!buffer.defined()) return block;
  const bool by_columns = block.stride(1) != 1 && block.stride(0) == 1;
  const at::Tensor memory = by_columns ? block.t() : block;
  at::Tensor copy = buffer.narrow(0, 0, block.numel()).view(memory.sizes());
  copy.copy_(memory);
  return by_columns ? copy.t() : copy;
}

// sum (+)= a @ b of float32 blocks.
void block_product(at::Tensor sum, const at::Tensor& a, const at::Tensor& b, bool add,
                   bool onednn) {
  if (onednn) {
    // In a profile it is an op, as PyTorch's products are.
    RECORD_FUNCTION("ckptfused::product", std::vector<c10::IValue>({a, b}));
    at::native::mkldnn_matmul(a, b, sum, add ? 1.0f : 0.0f, 1.0f);
  } else {
    add ? at::addmm_out(sum, sum, a, b) : at::mm_out(sum, a, b);
  }
}

// out (+)= a @ b + bias through float32 blocks: one product after the other, in a fixed order. Sums
// of at most a block's depth keep the error of oneDNN's products near that of MKL's.
void float_blocks_out(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                      const std::optional<at::Tensor>& bias, bool accumulate) {
  const int64_t n = a.size(0), c = a.size(1), k = b.size(1);
  const bool in_place = out.scalar_type() == at::kFloat, onednn = runs_in_onednn(a, b);
  const FloatBuffers buffers(out, a, b, bias.has_value());

  for (int64_t k0 = 0; k0 < k; k0 += buffers.k) {
    at::Tensor bias_block, b_block;
    if (bias) {
      bias_block =
          to_float(bias->slice(0, k0, std::min(k0 + buffers.k, k)).unsqueeze(0), buffers.bias);
    }
    for (int64_t n0 = 0; n0 < n; n0 += buffers.n) {
      const at::Tensor out_block = block_of(out, n0, buffers.n, k0, buffers.k);
      at::Tensor sum = out_block;
      if (!in_place) sum = buffers.sum.narrow(0, 0, sum.numel()).view(sum.sizes());
      if (accumulate && !in_place) sum.copy_(out_block);
      if (bias) sum.copy_(bias_block.expand_as(sum));
      for (int64_t c0 = 0; c0 < c; c0 += buffers.c) {
        const at::Tensor a_block = to_float(block_of(a, n0, buffers.n, c0, buffers.c), buffers.a);
        if (n0 == 0 || buffers.c < c) {  // a b block of full depth serves every block of rows
          b_block = to_float(block_of(b, c0, buffers.c, k0, buffers.k), buffers.b);
        }
        block_product(sum, a_block, b_block, accumulate || bias || c0 > 0, onednn);
      }
      if (!in_place) out_block.copy_(sum);
    }
  }
}

}  // namespace

bool is_half(at::ScalarType dtype) {
  return dtype == at::kBFloat16 || dtype == at::kHalf;
}

bool widens(const at::Tensor& like) {
  // Where cuBLAS may add up in float16 PyTorch refuses them: a setting of this moment.
  const bool half_on_gpu = like.is_cuda() && like.scalar_type() == at::kHalf;
  if (half_on_gpu && at::globalContext().allowFP16AccumulationCuBLAS()) return false;
  static std::mutex mutex;
  static std::map<std::pair<at::DeviceType, at::ScalarType>, bool> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [entry, is_new] =
      known.emplace(std::pair(like.device().type(), like.scalar_type()), true);
  if (!is_new) return entry->second;
  const at::Tensor a = at::empty({8, 8}, like.options());
  at::Tensor sum = at::empty({8, 8}, like.options().dtype(at::kFloat));
  try {
    at::addmm_out(sum, sum, a, a, at::kFloat);
  } catch (const c10::Error&) {
    entry->second = false;
    try {
      at::mm(a, a);
    } catch (...) {  // no product works now: that is another error, and says nothing
      known.erase(entry);
      throw;
    }
    TORCH_WARN("ckptfused: this PyTorch has no products of ", like.scalar_type(),
               " with a float32 result on ", like.device().type(),
               ": sums over tiles go through float32 copies there, which takes more time");
  }
  return entry->second;
}

namespace {

void count_product(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, bool bias,
                   bool float_blocks, bool accumulate) {
  const int64_t n = a.size(0), k = out.size(1), c = a.size(1);
  const int64_t written = out.scalar_type() != a.scalar_type() ? int64_t(out.nbytes()) : 0;
  const int64_t read = accumulate ? int64_t(out.nbytes()) : 0;
  counted_work(Ledger::product, {n, k, c, written + read}, a.scalar_type());
  if (out.numel() == 0) return;
  counted_launch("product");
  if (float_blocks) FloatBuffers(out, a, b, bias);
}

void product_out(at::Tensor out, const at::Tensor& a, const at::Tensor& b,
                 const std::optional<at::Tensor>& bias, bool accumulate) {
  const at::ScalarType dtype = a.scalar_type();
  const bool widened = is_half(dtype) && out.scalar_type() == at::kFloat;
  TORCH_CHECK(b.scalar_type() == dtype && (widened || out.scalar_type() == dtype),
              "matrix product: expected operands of one dtype and an output of it (or float32 for "
              "half precision), got ",
              dtype, " @ ", b.scalar_type(), " -> ", out.scalar_type());
  const bool float_blocks = (on_cpu(a) && (widened || runs_as_float(dtype))) ||
                            (dtype == at::kFloat && runs_in_onednn(a, b));
  if (counting()) return count_product(out, a, b, bias.has_value(), float_blocks, accumulate);
  if (out.numel() == 0) return;
  if (a.size(1) == 0) {
    if (!accumulate) bias ? out.copy_(bias->expand_as(out)) : out.zero_();
  } else if (float_blocks) {
    float_blocks_out(out, a, b, bias, accumulate);
  } else if (widened) {
    widened_out(out, a, b, accumulate);
  } else if (accumulate) {
    at::addmm_out(out, out, a, b);
  } else {
    bias ? at::addmm_out(out, *bias, a, b) : at::mm_out(out, a, b);
  }
}

}  // namespace

void widened_out(at::Tensor out, const at::Tensor& a, const at::Tensor& b, bool accumulate) {
  if (!widens(a)) return float_blocks_out(out, a, b, std::nullopt, accumulate);
  accumulate ? at::addmm_out(out, out, a, b, at::kFloat) : at::mm_out(out, a, b, at::kFloat);
}

void linear_out(const at::Tensor& out, const at::Tensor& in, const at::Tensor& w,
                const std::optional<at::Tensor>& bias, bool transposed) {
  const at::Tensor weight = transposed ? w : w.t();
  TORCH_CHECK(in.dim() == 2 && weight.dim() == 2 && in.size(1) == weight.size(0) &&
                  out.dim() == 2 && out.size(0) == in.size(0) && out.size(1) == weight.size(1),
              "linear: expected out [N, K] = in [N, C] @ weight [C, K], got ", out.sizes(), " = ",
              in.sizes(), " @ ", weight.sizes());
  product_out(out, in, weight, bias, false);
}

void matmul_out(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, bool accumulate) {
  TORCH_CHECK(a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0) && out.dim() == 2 &&
                  out.size(0) == a.size(0) && out.size(1) == b.size(1),
              "matrix product: expected out [N, K] = a [N, C] @ b [C, K], got ", out.sizes(), " = ",
              a.sizes(), " @ ", b.sizes());
  product_out(out, a, b, std::nullopt, accumulate);
}

int64_t onednn_workspace(int64_t multiplications) {
  const bool used = mkl_is_slow() && at::globalContext().userEnabledMkldnn();
  return used && multiplications >= kOneDnnProduct ? kOneDnnWorkspace * at::get_num_threads() : 0;
}

bool mkl_is_slow() {
  return processor().mkl_is_slow && &at::native::mkldnn_matmul != nullptr;
}

const char* product_kernel(at::ScalarType dtype, std::string* reason) {
  if (runs_as_float(dtype)) {
    *reason = "this processor has no matrix instructions for " + half_name(dtype);
    return "float32 blocks";
  }
  if (dtype == at::kFloat && mkl_is_slow()) {
    *reason = "large ones by oneDNN: MKL leaves this processor's AVX-512 alone";
  }
  return "PyTorch's product";
}

std::string half_name(at::ScalarType dtype) {
  return dtype == at::kBFloat16 ? "bfloat16" : "float16";
}

bool runs_as_float(at::ScalarType dtype) {
  return (dtype == at::kBFloat16 && !processor().bfloat16) ||
         (dtype == at::kHalf && !processor().half);
}

}  // namespace ckptfused
