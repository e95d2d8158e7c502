// Turns CUDA errors into absl statuses and clears the sticky ones.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace pgqa {

// OK, or the error with the failed operation's name. The runtime's last error is reset.
inline absl::Status CudaStatus(cudaError_t error, const char* operation) {
  if (error == cudaSuccess) return absl::OkStatus();
  (void)cudaGetLastError();
  const std::string message =
      absl::StrCat(operation, ": ", cudaGetErrorName(error), ": ", cudaGetErrorString(error));
  return error == cudaErrorMemoryAllocation ? absl::ResourceExhaustedError(message)
                                            : absl::InternalError(message);
}

}  // namespace pgqa

// Returns from the calling function, whose type takes a status, unless the CUDA call succeeds.
#define PGQA_RETURN_IF_CUDA_ERROR(call)                                  \
  do {                                                                   \
    const absl::Status cuda_status_ = ::pgqa::CudaStatus((call), #call); \
    if (!cuda_status_.ok()) return cuda_status_;                         \
  } while (false)
