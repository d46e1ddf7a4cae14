// Python module of the extension: importing it registers the ops. What is not an op is here.
#include "ops/torch.h"

#include <string>
#include <tuple>
#include <vector>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "autograd/settings.h"
#include "autograd/tiles.h"
#include "kernels/cpu/target.h"
#include "ops/adapters.h"
#include "ops/attention_tiles_cpu.h"
#include "ops/cuda_build.h"
#include "ops/linear.h"

namespace {

at::ScalarType dtype_named(const std::string& name) {
  if (name == "float64") return at::kDouble;
  if (name == "float32") return at::kFloat;
  if (name == "bfloat16") return at::kBFloat16;
  TORCH_CHECK(name == "float16", "expected float64, float32, bfloat16 or float16, got ", name);
  return at::kHalf;
}

// A Python context manager.
class UnderSettings {
 public:
  explicit UnderSettings(ckptfused::Settings settings) : settings_(std::move(settings)) {}
  void enter() { guard_.emplace(settings_); }
  void exit(const pybind11::args&) { guard_.reset(); }

 private:
  ckptfused::Settings settings_;
  std::optional<ckptfused::SettingsGuard> guard_;
};

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.attr("version") = CKPTFUSED_VERSION;
  m.attr("torch_version") = CKPTFUSED_TORCH_VERSION;
  m.attr("cuda_architectures") = ckptfused::kCudaArchitectures;
  m.def("current_settings", &ckptfused::current_settings);
  pybind11::class_<UnderSettings>(m, "UnderSettings")
      .def(pybind11::init<ckptfused::Settings>())
      .def("__enter__", &UnderSettings::enter)
      .def("__exit__", &UnderSettings::exit);
  m.def("cpu_target", &ckptfused::cpu_target_name);
  m.def("launch_error",
        [](const std::string& op, const std::string& status, const std::string& built_for,
           const std::string& gpu, int major, int minor) {
          return ckptfused::launch_error(op, status, built_for, {gpu, major, minor});
        });
  m.def("ffn_tiles", [](int64_t rows, int64_t width, int64_t hidden, bool gated, int64_t size) {
    const ckptfused::FFNTiles t = ckptfused::ffn_tiles(rows, width, hidden, gated, size);
    return std::make_tuple(t.rows, t.cols);
  });
  m.def("linear_scratch_bytes", [](int64_t n, int64_t k, int64_t c, const std::string& dtype) {
    return ckptfused::linear_scratch_bytes(n, k, c, dtype_named(dtype));
  });
  m.def("adapter_scratch_bytes", [](int64_t n, int64_t k, int64_t m, int64_t ranks, bool backward,
                                    bool din, int64_t da_ranks, int64_t db_ranks, int64_t dbiases,
                                    const std::string& dtype, int64_t threads) {
    const ckptfused::AdapterSizes sizes{n, k, m, ranks, backward, din, da_ranks, db_ranks, dbiases};
    return ckptfused::adapter_scratch_bytes(sizes, dtype_named(dtype), threads);
  });
  m.def("attention_scratch_bytes", [](bool backward, const std::string& dtype, int64_t queries,
                                      int64_t keys, int64_t head_dim) {
    const auto bytes =
        backward ? ckptfused::attention_bwd_scratch_bytes : ckptfused::attention_fwd_scratch_bytes;
    return bytes(dtype_named(dtype), queries, keys, head_dim);
  });
}
