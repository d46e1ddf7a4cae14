#pragma once

#include "ops/activation.h"
#include "ops/attention.h"
#include "ops/cross_entropy.h"
#include "ops/ledger.h"
#include "ops/norm.h"
#include "ops/qk.h"
#include "ops/residual.h"
#include "ops/sum_grads.h"

// The small ops while a ledger is open: the checks of every device, then scratch and launches as
// the named device's kernels have them.

namespace ckptfused::counted {

void run(NormFwd a, const RowCall& call);
void run(NormBwd a, const RowCall& call);
void run(ResidualFwd a, const RowCall& call);
void run(ResidualBwd a, const RowCall& call);
void run(ActivationFwd a, const RowCall& call);
void run(ActivationBwd a, const RowCall& call);
void run(const QkPartList<QkFwd>& parts);
void run(const QkPartList<QkBwd>& parts);
void run(const std::vector<GradSum>& sums, DType acc, const RowCall& call);
void run(CrossEntropyFwd a, const RowCall& call);
void run(CrossEntropyBwd a, const RowCall& call);

inline constexpr auto norm_fwd = &ckptfused::norm_fwd<run>;
inline constexpr auto norm_bwd = &ckptfused::norm_bwd<run>;
inline constexpr auto residual_fwd = &ckptfused::residual_fwd<run>;
inline constexpr auto residual_bwd = &ckptfused::residual_bwd<run>;
inline constexpr auto activation_fwd = &ckptfused::activation_fwd<run>;
inline constexpr auto activation_bwd = &ckptfused::activation_bwd<run>;
inline constexpr auto qk_fwd = &ckptfused::qk_fwd<run>;
inline constexpr auto qk_bwd = &ckptfused::qk_bwd<run>;
inline constexpr auto sum_grads = &ckptfused::sum_grads<run>;
int64_t grad_chunks(const at::Tensor& like, int64_t rows, int64_t cols, int64_t heads);
inline constexpr auto cross_entropy_fwd = &ckptfused::cross_entropy_fwd<run>;
inline constexpr auto cross_entropy_bwd = &ckptfused::cross_entropy_bwd<run>;

std::tuple<at::Tensor, at::Tensor> attention_fwd(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& mask,
    const OptionalTensor& padding, const OptionalTensor& cu_seqlens,
    const OptionalTensor& rng_state, std::string_view mask_kind, std::string_view padding_kind,
    double scale, bool causal, int64_t window, double softcap, double p);
std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_bwd(
    const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& o, const at::Tensor& lse, const OptionalTensor& mask,
    const OptionalTensor& padding, const OptionalTensor& cu_seqlens,
    const OptionalTensor& rng_state, std::string_view mask_kind, std::string_view padding_kind,
    double scale, bool causal, int64_t window, double softcap, double p);

// They write down themselves what they do.
inline constexpr auto attention_tile_fwd = &ckptfused::attention_tile_fwd;
inline constexpr auto attention_tile_bwd = &ckptfused::attention_tile_bwd;

// One kernel for products and activation: its products, for it has no scratch.
void ffn_up_fwd(const at::Tensor& x, const OptionalTensor& gate_w, const at::Tensor& up_w,
                const OptionalTensor& gate_b, const OptionalTensor& up_b, const OptionalTensor& rng,
                const at::Tensor& h, const OptionalTensor& g, const OptionalTensor& u,
                std::string_view act, bool transposed, double p, int64_t site, int64_t cols,
                int64_t row0, int64_t col0, at::IntArrayRef rows, std::string_view config);
void ffn_up_bwd(const OptionalTensor& x, const OptionalTensor& gate_w, const OptionalTensor& up_w,
                const OptionalTensor& gate_b, const OptionalTensor& up_b, const OptionalTensor& g,
                const OptionalTensor& u, const at::Tensor& ddown, const at::Tensor& down_w,
                const OptionalTensor& rng, const OptionalTensor& h, const OptionalTensor& dg,
                const OptionalTensor& du, std::string_view act, bool transposed, double p,
                int64_t site, int64_t cols, int64_t row0, int64_t col0, at::IntArrayRef rows,
                std::string_view config);

}  // namespace ckptfused::counted
