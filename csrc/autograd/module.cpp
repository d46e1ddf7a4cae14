// Python module of the extension: importing it registers the ops. What is not an op is here.
#include <string>
#include <tuple>
#include <vector>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "autograd/tiles.h"
#include "kernels/cpu/target.h"

#ifndef CKPTFUSED_CUDA_ARCHS
#define CKPTFUSED_CUDA_ARCHS ""
#endif

PYBIND11_MODULE(_C, m) {
  m.attr("version") = CKPTFUSED_VERSION;
  m.attr("torch_version") = CKPTFUSED_TORCH_VERSION;
  m.attr("cuda_architectures") = CKPTFUSED_CUDA_ARCHS;
  m.def("cpu_target", &ckptfused::cpu_target_name);
  m.def("ffn_tiles", [](int64_t rows, int64_t width, int64_t hidden, bool gated, int64_t size) {
    const ckptfused::FFNTiles t = ckptfused::ffn_tiles(rows, width, hidden, gated, size);
    return std::make_tuple(t.rows, t.cols);
  });
}
