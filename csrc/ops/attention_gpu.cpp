#include "ops/torch.h"

#include "ops/attention_gpu.h"

#include <ATen/ExpandUtils.h>
#include <c10/util/Logging.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <set>
#include <vector>

namespace ckptfused {
namespace {

using at::SDPBackend;
using at::Tensor;

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}
const std::string kOverride = environment("CKPTFUSED_ATTENTION");

// True, with the reason where one is asked for.
template <typename... Parts>
bool because(std::string* reason, const Parts&... parts) {
  if (reason != nullptr) *reason = c10::str(parts...);
  return true;
}

// Why neither of PyTorch's kernels can be used.
bool only_ours(const AttentionShape& s, const AttentionGpu& gpu, std::string* reason) {
  if (!s.plain()) {
    return reason == nullptr || because(reason, "PyTorch's kernels have ", s.missing());
  }
  if (s.dtype != at::kBFloat16 && s.dtype != at::kHalf) {
    return because(reason, s.dtype == at::kDouble ? "float64" : "float32",
                   ": PyTorch's kernels are for half precision");
  }
  if (s.head_dim % 8 != 0 || s.head_dim < 8 || s.head_dim > 256) {
    return because(reason, "head width ", s.head_dim,
                   ": PyTorch's kernels take multiples of 8 up to 256");
  }
  if (gpu.major < 8) {
    return because(reason, "compute capability ", gpu.major, ".", gpu.minor,
                   ": PyTorch's kernels need 8.0");
  }
  if (s.batch * s.heads * s.queries == 0) return because(reason, "nothing to compute");
  return false;
}

// Why cuDNN's kernel cannot be used: as sdp_utils.cpp has it, and it has no gradient that is
// repeatable. Its version with the fix for lengths that are no multiple of 128 is the first that
// PyTorch prefers. Of wider heads PyTorch 2.11 lets it make gradients on Hopper, and later ones no
// more, up to cuDNN 9.22.
bool no_cudnn(const AttentionShape& s, const AttentionGpu& gpu, std::string* reason) {
  const at::Context& context = at::globalContext();
  if (gpu.cudnn <= 91500) return because(reason, "cuDNN is older than 9.15.1, or not there");
  if (s.head_dim > 128) return because(reason, "cuDNN's gradient is used up to head width 128");
  if (s.keys == 1) return because(reason, "cuDNN's kernel takes two keys or more");
  if (std::max(s.batch, s.heads) > 65535) {
    return because(reason, "cuDNN's kernel takes up to 65535 batch elements and heads");
  }
  if (context.deterministicAlgorithms() && !context.deterministicAlgorithmsWarnOnly()) {
    return because(reason,
                   "cuDNN's gradient is not repeatable, and deterministic algorithms are "
                   "enabled");
  }
  return false;
}

// Why the flash kernel cannot be used: its backward refuses some widths on some chips.
bool no_flash(const AttentionShape& s, const AttentionGpu& gpu, std::string* reason) {
  const bool small_shared = (gpu.major == 8 && gpu.minor >= 6) || gpu.major == 12;
  return small_shared && s.head_dim > 192 && s.head_dim <= 224 &&
         because(reason, "head width ", s.head_dim, ": the flash kernel has no gradient there");
}

// Where PyTorch itself tries cuDNN before flash.
bool cudnn_comes_first(const AttentionGpu& gpu) {
  static const bool last = environment("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1";
  if (attention_order_is_the_first()) return !last && (gpu.major == 9 || gpu.major == 10);
  const auto order = at::globalContext().sDPPriorityOrder();
  const auto place = [&](SDPBackend b) { return std::find(order.begin(), order.end(), b); };
  return place(SDPBackend::cudnn_attention) < place(SDPBackend::flash_attention);
}

// o or its gradient as cuDNN's forward lays o out: dense, the dimensions in the order of q's.
// PyTorch 2.11 looks cuDNN's plans up by the sizes and strides of q, k and v alone (cudnn/MHA.cpp),
// so the strides of the other tensors have to follow from those.
Tensor in_order_of(const Tensor& q, const Tensor& t) {
  const std::vector<int64_t> strides = at::infer_dense_strides(q.sizes(), q.strides());
  bool fits = true;
  for (int64_t i = 0; i < t.dim(); ++i) fits &= t.size(i) <= 1 || t.stride(i) == strides[i];
  return fits ? t : at::empty_strided(q.sizes(), strides, q.options()).copy_(t);
}

// Says in the log what a call of cuDNN took that was a thread's first of its kind. PyTorch keeps
// plans by thread, and builds them on the host.
class FirstOfThread {
 public:
  FirstOfThread(const char* what, const Tensor& q, const Tensor& k, const Tensor& v, bool causal)
      : what_(what), sizes_(q.sizes().vec()) {
    std::vector<int64_t> key = {what[0], q.get_device(), int64_t(q.scalar_type()), causal};
    for (const Tensor* t : {&q, &k, &v}) {
      key.insert(key.end(), t->sizes().begin(), t->sizes().end());
      key.insert(key.end(), t->strides().begin(), t->strides().end());
    }
    constexpr size_t kMost = 1024;  // lengths that change with every step fill it; it begins anew
    thread_local std::set<std::vector<int64_t>> seen;
    if (seen.size() >= kMost) seen.clear();
    first_ = seen.insert(std::move(key)).second;
    if (first_) start_ = std::chrono::steady_clock::now();
  }
  ~FirstOfThread() {
    if (!first_) return;
    const std::chrono::duration<double, std::milli> taken =
        std::chrono::steady_clock::now() - start_;
    LOG(INFO) << "ckptfused: attention's " << what_ << " through cuDNN, the first of q " << sizes_
              << " on this thread, took " << taken.count()
              << " ms of host time: PyTorch builds cuDNN's plan once a thread";
  }
  FirstOfThread(const FirstOfThread&) = delete;
  FirstOfThread& operator=(const FirstOfThread&) = delete;

 private:
  const char* what_;
  std::vector<int64_t> sizes_;
  bool first_;
  std::chrono::steady_clock::time_point start_;
};

// t as PyTorch's kernels read it, 16 bytes at a time: itself where every row begins at such an
// address, which they do not check.
Tensor aligned(const Tensor& t) {
  constexpr int64_t kBytes = 16;
  bool fits = reinterpret_cast<uintptr_t>(t.const_data_ptr()) % kBytes == 0 &&
              (t.size(3) <= 1 || t.stride(3) == 1);
  for (int64_t i = 0; i < 3; ++i) {
    fits &= t.size(i) <= 1 || t.stride(i) * int64_t(t.element_size()) % kBytes == 0;
  }
  if (fits) return t;
  return t.transpose(1, 2).clone(at::MemoryFormat::Contiguous).transpose(1, 2);
}

}  // namespace

Tensor attention_rows(const Tensor& t) {
  return t.transpose(1, 2).contiguous().transpose(1, 2);
}

const char* attention_kernel_name(AttentionKernel kernel) {
  constexpr const char* kNames[] = {"triton", "flash", "cudnn"};
  return kNames[int(kernel)];
}

std::string_view attention_override() {
  return kOverride;
}

bool attention_order_is_the_first() {
  static constexpr std::array kFirst = {SDPBackend::flash_attention,
                                        SDPBackend::efficient_attention, SDPBackend::math,
                                        SDPBackend::cudnn_attention, SDPBackend::overrideable};
  const auto order = at::globalContext().sDPPriorityOrder();
  return std::equal(order.begin(), order.end(), kFirst.begin(), kFirst.end());
}

AttentionKernel attention_kernel(const AttentionShape& shape, const AttentionGpu& gpu,
                                 std::string_view wanted, std::string* reason) {
  if (only_ours(shape, gpu, reason)) return AttentionKernel::triton;
  std::string why_not;
  std::string* const why = reason == nullptr ? nullptr : &why_not;
  const bool cudnn = !no_cudnn(shape, gpu, why), flash = !no_flash(shape, gpu, why);
  const auto chosen = [&](AttentionKernel kernel, const auto&... parts) {
    because(reason, parts...);
    return kernel;
  };
  if (!wanted.empty()) {
    const auto asked = [&](AttentionKernel kernel, bool there) {
      return there && wanted == attention_kernel_name(kernel);
    };
    if (asked(AttentionKernel::triton, true)) {
      return chosen(AttentionKernel::triton, "CKPTFUSED_ATTENTION=", wanted);
    }
    if (asked(AttentionKernel::flash, flash)) {
      return chosen(AttentionKernel::flash, "CKPTFUSED_ATTENTION=", wanted);
    }
    if (asked(AttentionKernel::cudnn, cudnn)) {
      return chosen(AttentionKernel::cudnn, "CKPTFUSED_ATTENTION=", wanted);
    }
    const AttentionKernel other =
        wanted == "cudnn" && flash ? AttentionKernel::flash : AttentionKernel::triton;
    return chosen(other, "CKPTFUSED_ATTENTION=", wanted, ", but ", why_not);
  }
  const at::Context& context = at::globalContext();
  const bool may_flash = flash && context.userEnabledFlashSDP();
  // PyTorch prefers cuDNN on data-centre chips since Hopper. Elsewhere it comes first only where
  // the user puts it there, or leaves nothing else.
  const bool may_cudnn = cudnn && context.userEnabledCuDNNSDP();
  if (may_cudnn && cudnn_comes_first(gpu)) {
    return chosen(AttentionKernel::cudnn, "PyTorch's own choice on this GPU");
  }
  if (may_flash) {
    return chosen(AttentionKernel::flash,
                  "softmax over all or the causal keys in half precision, and nothing else",
                  why_not.empty() ? "" : "; ", why_not);
  }
  if (may_cudnn) {
    return chosen(AttentionKernel::cudnn,
                  "PyTorch's flash kernel is disabled (torch.backends.cuda)");
  }
  return chosen(AttentionKernel::triton,
                flash || cudnn ? "PyTorch's kernels are disabled (torch.backends.cuda)" : why_not);
}

std::tuple<Tensor, Tensor> attention_aten_fwd(AttentionKernel kernel, const Tensor& any_q,
                                              const Tensor& any_k, const Tensor& any_v,
                                              double scale, bool causal) {
  const Tensor q = aligned(any_q), k = aligned(any_k), v = aligned(any_v);
  Tensor o, lse;
  if (kernel == AttentionKernel::flash) {
    const auto results = at::_scaled_dot_product_flash_attention(
        q, k, v, /*dropout_p=*/0.0, causal, /*return_debug_mask=*/false, scale);
    std::tie(o, lse) = std::tie(std::get<0>(results), std::get<1>(results));
  } else {
    const FirstOfThread first("forward", q, k, v, causal);
    const auto results = at::_scaled_dot_product_cudnn_attention(
        q, k, v, /*attn_bias=*/std::nullopt, /*compute_log_sumexp=*/true, /*dropout_p=*/0.0, causal,
        /*return_debug_mask=*/false, scale);
    std::tie(o, lse) = std::tie(std::get<0>(results), std::get<1>(results));
  }
  return {attention_rows(o), lse.reshape(q.sizes().slice(0, 3)).contiguous()};
}

std::tuple<Tensor, Tensor, Tensor> attention_aten_bwd(AttentionKernel kernel,
                                                      const Tensor& any_dout, const Tensor& any_q,
                                                      const Tensor& any_k, const Tensor& any_v,
                                                      const Tensor& any_o, const Tensor& lse,
                                                      double scale, bool causal) {
  const Tensor dout = aligned(any_dout), o = aligned(any_o);
  const Tensor q = aligned(any_q), k = aligned(any_k), v = aligned(any_v);
  const int64_t queries = q.size(2), keys = k.size(2);
  Tensor dq, dk, dv;
  if (kernel == AttentionKernel::flash) {
    // Without dropout the kernels do not read the random state. The op is repeatable where
    // deterministic algorithms are asked for: it looks itself.
    const Tensor state = at::empty({2}, q.options().dtype(at::kUInt64));
    std::tie(dq, dk, dv) = at::_scaled_dot_product_flash_attention_backward(
        dout, q, k, v, o, lse, Tensor(), Tensor(), queries, keys, 0.0, causal, state, state, scale);
  } else {
    const FirstOfThread first("gradient", q, k, v, causal);
    const Tensor state = at::empty({}, q.options().dtype(at::kLong));
    std::tie(dq, dk, dv) = at::_scaled_dot_product_cudnn_attention_backward(
        in_order_of(q, dout), q, k, v, in_order_of(q, o), lse.unsqueeze(-1), state, state, Tensor(),
        Tensor(), Tensor(), queries, keys, 0.0, causal, scale);
  }
  return {attention_rows(dq), attention_rows(dk), attention_rows(dv)};
}

}  // namespace ckptfused
