#ifndef CKPTFUSED_OPS_TORCH_H
#define CKPTFUSED_OPS_TORCH_H

// The one header through which ops/ and autograd/ see torch. setup.py precompiles it, so each file
// includes it first.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#endif
