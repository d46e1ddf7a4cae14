// `_C.testing`: what only tests and benchmarks call.
#include "ops/torch.h"

#include <string>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "ops/attention.h"
#include "ops/attention_gpu.h"
#include "ops/cuda_build.h"
#include "ops/launch_records.h"
#include "ops/linear.h"

namespace {

ckptfused::AttentionKernel aten_kernel(const std::string& name) {
  TORCH_CHECK(name == "flash" || name == "cudnn", "expected flash or cudnn, got ", name);
  return name == "flash" ? ckptfused::AttentionKernel::flash : ckptfused::AttentionKernel::cudnn;
}

template <typename Result, typename... Args>
auto recorded(const char* op, Result (*)(Args...)) {
  const auto handle =
      c10::Dispatcher::singleton().findSchemaOrThrow(op, "").typed<Result(Args...)>();
  return [handle](Args... args) -> Result {
    return ckptfused::call_recorded(handle, nullptr, args...);
  };
}

// While it lives, attention on the CPU is what attention_cuda.cpp does where Triton's kernels are
// chosen: for tests and benchmarks/host_time_gpu.py, which bring attention_triton_* for the CPU.
class AttentionAsOnGpu {
 public:
  AttentionAsOnGpu() {
    library_.impl("attention_fwd",
                  recorded("ckptfused::attention_triton_fwd", &ckptfused::attention_fwd_cpu));
    library_.impl("attention_bwd",
                  recorded("ckptfused::attention_triton_bwd", &ckptfused::attention_bwd_cpu));
  }

 private:
  torch::Library library_{torch::Library::IMPL, "ckptfused", c10::DispatchKey::CPU, __FILE__,
                          __LINE__};
};

}  // namespace

void bind_testing(pybind11::module_ m) {
  m.def("launch_error",
        [](const std::string& op, const std::string& status, const std::string& built_for,
           const std::string& gpu, int major, int minor) {
          return ckptfused::launch_error(op, status, built_for, {gpu, major, minor});
        });
  m.def("group_products_on_cpu", &ckptfused::group_products_on_cpu);
  m.def("widened_out", &ckptfused::widened_out);
  m.def("linear_out", &ckptfused::linear_out);
  m.def("attention_aten_fwd",
        [](const std::string& kernel, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
           double scale, bool causal) {
          return ckptfused::attention_aten_fwd(aten_kernel(kernel), q, k, v, scale, causal);
        });
  m.def("attention_aten_bwd", [](const std::string& kernel, const at::Tensor& dout,
                                 const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const at::Tensor& o, const at::Tensor& lse, double scale,
                                 bool causal) {
    return ckptfused::attention_aten_bwd(aten_kernel(kernel), dout, q, k, v, o, lse, scale, causal);
  });
  const auto tile_of = [](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          double scale, bool causal, const std::vector<int64_t>& tile) {
    return ckptfused::attention_problem("attention_tile", q, k, v, {}, {}, {}, {}, "none", "none",
                                        scale, causal, 0, 0.0, 0.0, tile);
  };
  m.def("attention_tile_fwd_gpu", [=](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      double scale, bool causal, const std::vector<int64_t>& tile) {
    return ckptfused::attention_tile_fwd_gpu(tile_of(q, k, v, scale, causal, tile), tile);
  });
  m.def("attention_tile_bwd_gpu",
        [=](const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
            const at::Tensor& o, const at::Tensor& lse, const at::Tensor& dk, const at::Tensor& dv,
            double scale, bool causal, const std::vector<int64_t>& tile) {
          const auto a = tile_of(q, k, v, scale, causal, tile);
          const auto result = ckptfused::attention_result("attention_tile", a, dout, o, lse);
          return ckptfused::attention_tile_bwd_gpu(a, result, dk, dv, tile);
        });
  m.def("use_launch_records", &ckptfused::use_launch_records);
  m.def("launch_record_hits", &ckptfused::launch_record_hits);
  pybind11::class_<AttentionAsOnGpu>(m, "AttentionAsOnGpu").def(pybind11::init());
}
