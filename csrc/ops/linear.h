#pragma once

#include "ops/torch.h"

#include <string>

// The one place where matrix products are called. Outputs and operands may be column slices of
// wider buffers or transposed views: nothing is copied to make them contiguous. The kernel and
// its blocks are a pure function of shape, dtype and device, so that a product made again gives
// the same bits.
//
// Half-precision products on a processor without matrix instructions for the type (oneDNN is
// several times slower there than sgemm) run as float32, block by block, and are rounded once.
// Large float32 products on an x86 processor with AVX-512 that is not Intel's, where MKL makes them
// at half the rate that oneDNN does, are oneDNN's, block by block too.

namespace ckptfused {

// out = in @ w^T + bias, or in @ w + bias when transposed.
// Shapes: out [N, K], in [N, C], w [K, C] ([C, K] when transposed), bias [K]; one dtype.
void linear_out(const at::Tensor& out, const at::Tensor& in, const at::Tensor& w,
                const std::optional<at::Tensor>& bias, bool transposed);

// out = a @ b, or out += a @ b when accumulate.
// Shapes: out [N, K], a [N, C], b [C, K]. a and b have one dtype; out has it too, or is the
// float32 accumulator of a half-precision product. A sum over many products belongs in such an
// accumulator; one over the few parts of a projection may be rounded to out's type each time.
void matmul_out(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, bool accumulate);

// The same of half-precision operands into float32, as devices other than the CPU make it: by
// PyTorch's product with a float32 result or, where PyTorch refuses that, through float32 blocks.
void widened_out(at::Tensor out, const at::Tensor& a, const at::Tensor& b, bool accumulate);

// Whether it is a half-precision type: bfloat16 or float16.
bool is_half(at::ScalarType dtype);

// Whether this PyTorch has products of a half-precision type with a float32 result on this kind of
// device: where it has not, it refuses before anything runs. Asked once, so that a product made
// again is made the same way; float16 has none while `allow_fp16_accumulation` is on.
bool widens(const at::Tensor& like);

// Whether the CPU's products of this dtype go through float32 blocks.
bool runs_as_float(at::ScalarType dtype);

// Whether large float32 products are oneDNN's on this processor, where PyTorch's are MKL's (all of
// them are while `torch.backends.mkldnn.enabled` is False).
bool mkl_is_slow();

// What makes the CPU's products of this dtype, for a person, and why that.
const char* product_kernel(at::ScalarType dtype, std::string* reason);

// Of bfloat16 or float16.
std::string half_name(at::ScalarType dtype);

// The most bytes that oneDNN allocates within a float32 product of so many multiplications.
int64_t onednn_workspace(int64_t multiplications);

// Whether products of one type with a matrix for each group of rows go in one launch: bfloat16's on
// a GPU. Sizes are then multiples of 16 bytes.
bool groups_products(const at::Tensor& t, at::ScalarType dtype);
// Each group of rows of a times its matrix of b [E, C, K]: [N, K]. Of b [N, K], each group of
// columns of a times its rows of b: [E, C, K]. bounds: int32 [E], where each group ends.
at::Tensor grouped_product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bounds);
// Has the CPU's go so, too: for tests.
void group_products_on_cpu(bool on);

}  // namespace ckptfused
