// A decode step that is captured once and replayed for any lengths, pages and live batch.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pgqa/cuda_graph.h"
#include "pgqa/decode.h"
#include "pgqa/graph_spec.h"

namespace pgqa {

// What a caller who issues the layers of a step is given.
struct GraphStep {
  cudaStream_t stream = nullptr;
  PageTableView table;      // the graph's, requests past the live batch empty
  WorkspaceView workspace;  // for Decode() calls of the spec's shape, one after another
};

// Issues the layers of a step onto `step.stream`, in place of GraphSpec::layers. Called by Create()
// never, by Capture() twice, and by Rebind() and by Replay() into a capture once each. A capture into which it
// failed has to be discarded.
using IssueLayers = std::function<absl::Status(const GraphStep& step)>;

// The graph owns memory for what its spec leaves null, and a workspace that nothing else uses. The
// page table and the tensors are read at every replay: rewrite them in place, ordered before it as
// any kernel's inputs are. Requests that the table says nothing of are empty (page_indptr repeated,
// seq_lens below 0): output 0, LSE -inf, nothing read, nothing appended. Requests past the live batch count as
// empty whatever the table says.
//
// Nothing synchronises, but Create() and the destructor, which allocate and free. One thread at a
// time. Replays run one after another, whichever streams they go to. Statuses as in cuda_graph.h;
// after a refusal the graph and the stream are as they were. One that was moved from may only be
// destroyed or assigned to; Capture() and Replay() refuse it.
class DecodeGraph {
 public:
  // Allocates on the current device and tries the launches without running any.
  //   InvalidArgument  the spec, an address that is not device memory of this device, a layer
  static absl::StatusOr<DecodeGraph> Create(const GraphSpec& spec, IssueLayers issue = nullptr);

  DecodeGraph(DecodeGraph&&) noexcept;
  DecodeGraph& operator=(DecodeGraph&&) noexcept;
  // Waits for the device where it frees memory.
  ~DecodeGraph();

  // Runs the step once on `stream` for a live batch of 0 (outputs become 0, LSE -inf, caches stay),
  // captures it on a stream of its own and uploads it. Replays on another stream than `stream` have
  // to be ordered behind it. Again: captures anew, for the whole batch; `stream` has to be ordered
  // behind earlier replays, whose memory this run uses.
  absl::Status Capture(cudaStream_t stream);

  // Launches the step for the live batch told last, at first shape.batch. Where `stream` is being
  // captured, the step's launches are recorded into that capture instead: the graph that comes of it
  // works in this one's memory, and must not run later than it lives or at the same time.
  //   FailedPrecondition  no Capture() before; the graph was moved from
  //   InvalidArgument  another device is current
  absl::Status Replay(cudaStream_t stream);

  // The same for a live batch, 0 to shape.batch, told from here on. Changes a parameter of the head
  // node where it differs from the last. InvalidArgument where it does not fit, or
  // GraphSpec::live_batch is off.
  absl::Status Replay(int32_t live_batch, cudaStream_t stream);

  // Addresses, strides, scalars and table sizes of `spec` for later replays, by node parameters:
  // the executable stays the same. The rest of `spec` must be as in Create(); what was null there
  // may be null here. What was told of a live batch stays.
  //   InvalidArgument  something else differs, or as for Create()
  //   FailedPrecondition  no Capture() before; the step has other nodes than before, as where more or fewer windows
  //                       are shared by layers
  absl::Status Rebind(const GraphSpec& spec);

  // InvalidArgument unless a step fits CapacityOf(spec()). Reads no device memory.
  absl::Status CheckStep(int32_t live_batch, int64_t num_pages) const;

  // The spec with all addresses filled in.
  const GraphSpec& spec() const;
  int32_t device() const;
  // As told last; shape.batch before.
  int32_t live_batch() const;
  // Buffers and workspace; CUDA's own memory for an executable, some 100 KB, is not counted.
  int64_t device_bytes() const;
  // The executable, the same from Capture() on, and its nodes as captured. Null and
  // FailedPrecondition before.
  cudaGraphExec_t exec() const;
  absl::StatusOr<std::vector<GraphNode>> Nodes() const;

 private:
  struct State;
  explicit DecodeGraph(std::unique_ptr<State> state);
  absl::Status CheckAlive() const;
  absl::Status CheckCaptured() const;
  absl::Status Launch(int32_t live_batch, cudaStream_t stream);

  std::unique_ptr<State> state_;
};

}  // namespace pgqa
