// Layers that read each other, one behind the other, and the images that the first of them read.
#pragma once

#include "layers.h"

namespace kd {

// Of images that lie anyhow; the result lies channels last.
Tensor all_of(at::ArrayRef<Layer> layers, at::ArrayRef<Tensor> given);

// The same for an output that is wanted in rows, as it is where a graph ends.
Tensor all_in_rows(at::ArrayRef<Layer> layers, at::ArrayRef<Tensor> given);

}  // namespace kd
