#pragma once

#include "ops/torch.h"

#include <string>
#include <string_view>
#include <tuple>

#include "ops/attention.h"

// Attention on a GPU: which kernel makes a call, and PyTorch's own. Neither needs CUDA to be
// compiled, so that a machine without a GPU can ask for the choice and run the calls on meta
// tensors.

namespace ckptfused {

enum class AttentionKernel { triton, flash, cudnn };
const char* attention_kernel_name(AttentionKernel kernel);

struct AttentionGpu {
  int64_t major, minor;
  int64_t cudnn;  // the library's version as it numbers itself; 0: none
};

// CKPTFUSED_ATTENTION as it was when the library was loaded: forward and backward must agree.
std::string_view attention_override();

// Whether PyTorch's kernels are tried in the order that it starts with, which nobody wished: at the
// first call of scaled_dot_product_attention on a GPU PyTorch replaces it.
bool attention_order_is_the_first();

// The kernel of a call: cuDNN's where PyTorch 2.11 prefers it, its flash kernel elsewhere, ours for
// what neither does. A function of its arguments and of PyTorch's settings (deterministic
// algorithms; which kernels scaled_dot_product_attention may use, and their order), under which a
// replay runs as its forward did. wanted: a kernel's name, taken where it can do the job, or "".
// reason: for a person; null where nobody asks.
AttentionKernel attention_kernel(const AttentionShape& shape, const AttentionGpu& gpu,
                                 std::string_view wanted, std::string* reason = nullptr);

// t with memory [B, T, heads, D]: itself if it has that already.
at::Tensor attention_rows(const at::Tensor& t);

// PyTorch's flash or cuDNN kernel over all keys or the causal ones. q [B, H, T, D], k and v
// [B, G, T, D], the entries of a row side by side, half precision. Result: o like q with memory
// [B, T, H, D]; lse [B, H, T], float32, contiguous.
std::tuple<at::Tensor, at::Tensor> attention_aten_fwd(AttentionKernel kernel, const at::Tensor& q,
                                                      const at::Tensor& k, const at::Tensor& v,
                                                      double scale, bool causal);
// The gradients of q, k and v, with memory [B, T, heads, D].
std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_aten_bwd(
    AttentionKernel kernel, const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
    const at::Tensor& v, const at::Tensor& o, const at::Tensor& lse, double scale, bool causal);

// Whether the flash kernel makes such attention by tiles of queries, on the GPU that the work on x
// is for. What it lacks in whole calls it lacks here.
bool has_tiles_on_gpu(const AttentionShape& shape, const at::Tensor& x);
// The build with CUDA says what GPUs are.
void set_gpu_of(AttentionGpu (*known)(at::Device));

// The ops of a tile of queries, a batch of which they were checked for.
std::tuple<at::Tensor, at::Tensor> attention_tile_fwd_gpu(const AttentionProblem& a,
                                                          QueryTile tile);
at::Tensor attention_tile_bwd_gpu(const AttentionProblem& a, const AttentionResult& result,
                                  const at::Tensor& dk, const at::Tensor& dv, QueryTile tile);

struct FlashSizes {
  int64_t batch, heads, kv_heads, queries, keys, head_dim;
};
// Bytes that the backward of PyTorch's flash kernel allocates within itself (flash_api.cpp): dq and
// the sums of do·o in float32, rows in blocks of 128 and heads of 32 entries (64 from 129 on), and
// under GQA the gradients of k and v by query head.
//
// Repeatable, it adds up dq without atomics: in as many copies as give every multiprocessor one of
// the B·H heads, multiprocessors / (B·H) rounded up.
int64_t flash_gpu_scratch(const FlashSizes& sizes, int64_t multiprocessors);

}  // namespace ckptfused
