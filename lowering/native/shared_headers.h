// What most files read of torch. It is put before them when the library is built, precompiled; each
// file includes what it needs all the same.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>
