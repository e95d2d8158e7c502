// Launches one kernel whose only parameter is a struct of arguments.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

namespace pgqa {

// `early`: before the kernel before it on the stream has ended; the kernel has to wait for that by itself. Not <<<>>>:
// its status would have to be told from errors that the application left behind.
template <class Params>
cudaError_t Launch(const void* kernel, dim3 grid, dim3 block, size_t shared_memory_bytes,
                   bool early, const Params& params, cudaStream_t stream) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_memory_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  void* arguments[] = {const_cast<Params*>(&params)};
  return cudaLaunchKernelExC(&config, kernel, arguments);
}

}  // namespace pgqa
